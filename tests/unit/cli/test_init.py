"""`qwengyre init`: what it writes can be loaded, checked and solved, for every harness, installed or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.cli.starter import agent
from qwengyre.cli.starter_harnesses import HARNESSES
from qwengyre.runtime.notes import worth_knowing
from qwengyre.runtime.run_config import RunConfig, load_run
from qwengyre.sandbox.task import check_tasks


def init(*words: str) -> Any:
    return CliRunner().invoke(application(["init"]), ["init", *words])


def install(folder: Path, program: str) -> Path:
    """As npm does: a link into node_modules, to a script that node runs."""
    script = folder / "lib" / "node_modules" / "@someone" / program / "cli.js"
    script.parent.mkdir(parents=True)
    script.write_text("#!/usr/bin/env node\n")
    script.chmod(0o755)
    (folder / "bin").mkdir()
    for name, target in ((program, script), ("node", Path("/bin/true"))):
        (folder / "bin" / name).symlink_to(target)
    return folder / "bin" / program


def written(folder: Path) -> RunConfig:
    for inner in ("train", "held-out"):
        assert check_tasks(folder / "tasks" / inner)[1] == []
    tasks = [f"tasks.train={folder}/tasks/train", f"tasks.held_out={folder}/tasks/held-out"]
    return load_run(folder / "run.toml", [*tasks, "policy.model="])


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_that_is_here_is_found_with_what_it_needs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = install(tmp_path / "npm", HARNESSES[name].program)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    result = init(str(tmp_path / "made"), "--harness", name, "--model", "some/folder")
    assert result.exit_code == 0, result.output
    assert 'model = "some/folder"' in (tmp_path / "made" / "run.toml").read_text()
    harness = written(tmp_path / "made").harness
    assert str(program) in harness.command and any("{instruction}" in word for word in harness.command)
    assert str(tmp_path / "npm/lib/node_modules") in harness.readable, "not the one package, which needs others"
    assert "is not on this machine" not in result.output


def test_a_virtual_environment_is_shown_with_the_python_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, python = tmp_path / "mini", tmp_path / "python" / "bin" / "python3"
    for file in (home / "bin" / "mini", python):
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    (home / "pyvenv.cfg").touch()
    (home / "bin" / "python").symlink_to(python)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/usr/bin:/bin")
    init(str(tmp_path / "made"), "--harness", "mini-swe-agent")
    assert written(tmp_path / "made").harness.readable == (str(home), str(tmp_path / "python"))


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_that_is_not_here_says_how_to_have_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = init(str(tmp_path / "made"), "--harness", name)
    assert result.exit_code == 0 and HARNESSES[name].install in " ".join(result.output.split())
    assert "was not found" in (tmp_path / "made" / "run.toml").read_text()
    assert written(tmp_path / "made").harness.command


def test_an_own_agent_comes_with_it_and_only_the_model_is_missing(tmp_path: Path):
    result = init(str(tmp_path / "made"))
    assert result.exit_code == 0 and "policy.model in run.toml" in result.output
    config = written(tmp_path / "made")
    assert config.harness.readable == (str(tmp_path / "made" / "agent.py"),)
    assert any(note.startswith("policy.model is empty") for note in worth_knowing(config))


@pytest.mark.parametrize("there", ["run.toml", "tasks", "agent.py"])
def test_nothing_is_written_over(there: str, tmp_path: Path):
    (tmp_path / there).mkdir()
    result = init(str(tmp_path))
    assert result.exit_code == 2 and there in result.output
    assert [path.name for path in tmp_path.iterdir()] == [there], "all or nothing"


def test_recipes_are_written_and_named(tmp_path: Path):
    assert init("--recipe", "quickstart", str(tmp_path)).exit_code == 0
    assert load_run(tmp_path / "quickstart.toml").tasks.family == "mini-repositories"
    assert init("--recipe", "quickstart", str(tmp_path)).exit_code == 2, "nothing is written over"
    assert "Did you mean 'quickstart'" in init("--recipe", "quikstart", str(tmp_path)).output
    assert "quickstart-vllm" in init("--recipe", "list").output


def test_every_page_can_be_read_in_a_terminal():
    result = CliRunner().invoke(application(["docs"]), ["docs", "docs/training.md"])
    assert result.exit_code == 0 and "Training on trees" in result.output
    wrong = CliRunner().invoke(application(["docs"]), ["docs", "trainning"])
    assert wrong.exit_code == 2 and "did you mean training?" in wrong.output


def test_a_misspelt_harness_is_told_the_nearest(tmp_path: Path):
    result = init(str(tmp_path / "made"), "--harness", "claude")
    assert result.exit_code == 2 and "claude-code" in result.output and not (tmp_path / "made").exists()


def test_the_agent_runs_what_it_is_asked_to_and_says_what_was_wrong():
    assert agent.run(json.dumps({"command": "echo seen; exit 3"})) == "seen\n\n(exit code 3)"
    for arguments in ("{", "[]", "{}", '{"command": 3}'):
        assert agent.run(arguments).startswith("the arguments must be an object"), arguments


@pytest.mark.parametrize("task", ["train/sum-orders", "train/count-words", "held-out/find-errors"])
def test_a_solution_earns_all_and_half_of_it_a_part(task: str, tmp_path: Path):
    init(str(tmp_path / "made"))
    folder = tmp_path / "made" / "tasks" / task
    work = folder / "environment"

    def score() -> float:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(folder / "tests" / "score.py"), str(folder / "tests")], cwd=work, capture_output=True
        )
        return float(done.stdout)

    before = {path.name for path in work.iterdir()}
    assert score() == 0
    subprocess.run(["bash", str(folder / "solution" / "solve.sh")], cwd=work, check=True)
    assert score() == 1
    [answer] = (path for path in work.iterdir() if path.name not in before)
    answer.write_text("".join(answer.read_text().splitlines(keepends=True)[:-1]))
    assert 0 < score() < 1
