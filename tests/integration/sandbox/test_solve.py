"""`qwengyre tasks check --solve`: tasks are tried out without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application

pytestmark = pytest.mark.integration

BY_FILE = 'if [ -e answer ]; then cat answer; else echo 0; fi > "$VERIFIER_DIR/reward.txt"\n'


def task(folder: Path, solution: str | None, test: str = BY_FILE) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n')
    (folder / "instruction.md").write_text("Write 1 into the file answer.\n")
    (folder / "tests" / "test.sh").write_text(test)
    if solution is not None:
        (folder / "solution").mkdir()
        (folder / "solution" / "solve.sh").write_text(solution)


def check(folder: Path, *options: str) -> tuple[int, list[str]]:
    words = ["tasks", "check", str(folder), "--solve", *options]
    result = CliRunner().invoke(application(words), words)
    return result.exit_code, result.output.splitlines()


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_solutions_are_run_and_scored_as_a_harness_is(tmp_path: Path, isolation: str):
    task(tmp_path / "tasks" / "a-good", "echo 1 > answer\n")
    task(tmp_path / "tasks" / "b-without", None)
    assert check(tmp_path / "tasks", "--isolation", isolation) == (
        0,
        [
            "2 tasks usable, 0 errors, 0 warnings",
            "a-good: untouched 0, solved 1",
            "b-without: untouched 0, no solution",
            "2 of 2 tasks can be learned from",
        ],
    )


def test_what_cannot_be_learned_from_is_named(tmp_path: Path):
    task(tmp_path / "tasks" / "a-half", "echo 0.5 > answer\n")
    task(tmp_path / "tasks" / "b-free", None, 'echo 1 > "$VERIFIER_DIR/reward.txt"\n')
    task(tmp_path / "tasks" / "c-broken", "echo 1 > answer\n", "no-such-program  # writes no reward\n")
    task(tmp_path / "tasks" / "d-crashes", "echo oh no; exit 3\n")
    code, lines = check(tmp_path / "tasks")
    assert code == 1
    assert "a-half: untouched 0, solved 0.5: its solution scores 0.5, not 1: tests/test.sh does not accept it" in lines
    assert (
        "b-free: untouched 1, no solution: an untouched workspace scores 1, the most there is: nothing can be learned from it"
        in lines
    )
    assert any(line.startswith("c-broken: ") and "an untouched workspace cannot be scored: " in line for line in lines)
    assert any(line.startswith("d-crashes: untouched 0, solved 0: its solution scores 0, not 1: exit code 3") for line in lines)
    assert lines[-1] == "0 of 4 tasks can be learned from"
