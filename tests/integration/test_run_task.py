"""`qwengyre run-task`: one execution of one task, with the output of its harness."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application
from tests.integration.run_kit import RunKit

pytestmark = pytest.mark.integration
COMMAND = (sys.executable, "-c", "from qwengyre.cli.main import main; main()", "run-task")


def test_one_execution_shows_its_output_and_keeps_its_workspace(tmp_path: Path):
    kit = RunKit(tmp_path)
    harness = Path(tmp_path / "harness.py")
    harness.write_text(harness.read_text() + 'print("seen by whoever debugs it", flush=True)\n')
    words = [*COMMAND, str(tmp_path / "train" / "train-0"), "--run", str(kit.run_file), "--keep", str(tmp_path / "kept")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, score, _ = done.stdout.splitlines()
    assert first == "seen by whoever debugs it" and score.startswith("exited, valid, score 0.")
    assert (tmp_path / "kept" / "workspace" / "answer").read_text(errors="replace")
    listed = ["inspect", str(tmp_path / "kept"), "--json"]
    [line] = CliRunner().invoke(application(listed), listed).output.splitlines()
    assert (json.loads(line)["num_calls"], json.loads(line)["end"]) == (3, "closed")


def test_a_harness_that_fails_says_why(tmp_path: Path):
    kit = RunKit(tmp_path)
    words = [*COMMAND, str(tmp_path / "train" / "train-0"), "--run", str(kit.run_file), "--keep", str(tmp_path / "kept")]
    done = subprocess.run([*words, "--harness", "bash -c 'echo oh no; exit 3'"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("oh no\n") and "never_called, dropped" in done.stdout
    assert "OPENAI_BASE_URL" in done.stdout, "what to look at"


@pytest.mark.parametrize(
    ("options", "message"),
    [((), "--harness: name a harness"), (("--harness", "true"), "--model: name the folder of a model")],
)
def test_what_is_missing_is_named(tmp_path: Path, options: tuple[str, ...], message: str):
    RunKit(tmp_path)
    words = ["run-task", str(tmp_path / "train" / "train-0"), "--keep", str(tmp_path / "kept"), *options]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 2 and message in result.output and not (tmp_path / "kept").exists()
