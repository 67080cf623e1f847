from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qwengyre.config.dump import dump_toml
from qwengyre.config.load import loads
from qwengyre.config.run import RunConfig, load_run
from qwengyre.config.shape import keys
from qwengyre.core.errors import ConfigError

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
    code = "import sys, qwengyre.config.run; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
