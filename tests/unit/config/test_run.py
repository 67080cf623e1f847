from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from qwengyre.config.convert import RENAMED
from qwengyre.config.dump import dump_toml
from qwengyre.config.load import loads
from qwengyre.config.shape import keys
from qwengyre.core.errors import ConfigError
from qwengyre.runtime.run_config import RunConfig, load_run

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_its_resolved_form_is_the_same(recipe: Path):
    config = load_run(recipe)
    assert loads(dump_toml(config), RunConfig) == config


def test_every_key_has_a_docstring():
    assert [".".join(key.path) for key in keys(RunConfig) if not key.doc] == []


def test_a_misspelt_key_of_a_component_is_found(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[trainer]\nlearning_rat = 1e-3\n")
    with pytest.raises(
        ConfigError, match=r"run\.toml:2: trainer\.learning_rat: no such key\. Did you mean trainer\.learning_rate\?"
    ):
        load_run(path)


def test_reading_a_run_file_imports_no_torch():
    code = "import sys, qwengyre.runtime.run_config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_relative_paths_are_those_of_the_folder_that_a_command_starts_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "files").mkdir()
    run_file = tmp_path / "files" / "run.toml"
    run_file.write_text('[tasks]\ntrain = "tasks"\n[harness]\ncommand = ["bin/agent", "a/b"]\n[policy]\nmodel = "~/model"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/users/me")
    config = load_run(run_file, ["trajectory.harness_rules=../rules.toml"])
    assert config.tasks.train == f"{tmp_path}/tasks" and config.tasks.held_out == ""
    assert config.policy.model == "/users/me/model" and config.policy.cache == f"{tmp_path}/.cache/qwengyre"
    assert config.trajectory.harness_rules == f"{tmp_path.parent}/rules.toml"
    assert config.harness.command == (f"{tmp_path}/bin/agent", "a/b")
    run_file.write_text(dump_toml(config))
    monkeypatch.chdir("/")
    assert load_run(run_file) == config


def test_a_new_key_of_free_text_is_either_a_path_or_named_here_as_none():
    assert {key for key, kind in kinds(RunConfig) if kind is str} <= {
        "runtime.name",
        "transfer.host",
        "gateway.host",
        "gateway.public_url",
        "ray.address",
        "sandbox.image",
        "sandbox.harbor.agent",
        "sandbox.harbor.environment",
        "sandbox.harbor.model_name",
        "transfer.mooncake_device",
        "hooks.reward",
        "hooks.group_filter",
        "hooks.advantage",
        "hooks.choice",
        "hooks.token_loss",
        "tasks.source",
        "tracking.project",
        "tracking.mlflow_uri",
        "tracking.prometheus",
    }


def kinds(struct: type[msgspec.Struct], table: str = "") -> Iterator[tuple[str, object]]:
    for name, kind in get_type_hints(struct).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from kinds(kind, f"{table}{name}.")
        else:
            yield f"{table}{name}", kind


def test_a_key_of_an_earlier_run_file_is_refused_with_what_to_write_now():
    for (table, old), new in RENAMED.items():
        with pytest.raises(ConfigError, match=rf"run.toml:2: {table}\.{old}: no such key any more\. Write {re.escape(new)}\n"):
            loads(f'[{table}]\n{old} = "shm"\n', RunConfig, file="run.toml")
        assert new in {".".join(key.path) for key in keys(RunConfig)}
