"""What a user gets wrong ends the real program at once, with one clear line, exit code 2 and no run folder left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.dashboard.server import listen
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import Metrics
from qwengyre.telemetry.records import FINISHED, CountsSampled, RunEnded
from tests.integration.run_kit import RunKit

pytestmark = pytest.mark.integration

GOOD = """
[tasks]
train = "{train}"
[harness]
command = ["bash", "-c", "true"]
isolation = "none"
[evaluation]
at_start = false
at_end = false
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GOOD.format(train=tmp_path / "tasks"))
    return path


def qwengyre(*arguments: object) -> tuple[int, str]:
    """Exit code and standard error of the program."""
    program = [sys.executable, "-c", "from qwengyre.cli.main import main; main()"]
    done = subprocess.run([*program, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stderr


def train(run_file: Path, *arguments: object) -> tuple[int, str]:
    runs = run_file.parent / "runs"
    result = qwengyre("train", run_file, "--runs-dir", runs, *arguments)
    assert not runs.exists() or not list(runs.iterdir()), "a run that was refused leaves no folder"
    return result


def test_unknown_key(run_file: Path):
    assert train(run_file, "--set", "scheduler.num_cell=3") == (
        2,
        "error: --set scheduler.num_cell=3: scheduler.num_cell: no such key. Did you mean scheduler.num_cells?\n",
    )


def test_mistyped_key(run_file: Path):
    run_file.write_text(run_file.read_text() + "[scheduler]\nnum_cells = 'three'\n")
    code, error = train(run_file)
    assert code == 2
    assert error.startswith(f"error: {run_file}:11: scheduler.num_cells: expected int")


def test_missing_run_file(tmp_path: Path):
    code, error = qwengyre("train", tmp_path / "absent.toml")
    assert (code, error) == (2, f"error: {tmp_path / 'absent.toml'}: cannot read this file (No such file or directory)\n")


def test_missing_tasks(run_file: Path):
    code, error = train(run_file)
    assert code == 2
    assert f"error: {run_file.parent / 'tasks'}: tasks.train: this folder of tasks does not exist\n" in error


def test_missing_task_file(run_file: Path):
    folder = run_file.parent / "tasks" / "one"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n')
    code, error = train(run_file)
    assert code == 2
    assert "instruction.md" in error


def test_harness_command_that_does_not_exist(run_file: Path):
    code, error = train(run_file, "--set", 'harness.command=["no-such-agent"]')
    assert code == 2
    assert "harness.command: no-such-agent does not exist" in error


def test_resuming_what_is_no_run(tmp_path: Path):
    code, error = qwengyre("train", "--resume", tmp_path)
    assert (code, error) == (2, f"error: {tmp_path}: not the folder of a run: no config.toml in it\n")


def test_resuming_a_folder_of_the_users_own_leaves_it_alone(run_file: Path):
    run_file.rename(run_file.parent / "config.toml")
    (run_file.parent / "thesis.txt").write_text("precious")
    code, error = qwengyre("train", "--resume", run_file.parent)
    assert code == 2
    assert "no run was begun here" in error
    assert (run_file.parent / "thesis.txt").read_text() == "precious"


def test_a_resume_that_is_refused_removes_nothing(run_file: Path):
    folder = RunFolder.create(run_file.parent / "runs", "run", run_file.read_text())
    folder.gateway_journal.write_bytes(b"tokens")
    for mistake, message in (
        ([], "the journal of the controller is missing"),
        (["--set", 'harness.command=["no-such-agent"]'], "does not exist"),
    ):
        code, error = qwengyre("train", "--resume", folder.path, *mistake)
        assert code == 2 and message in error
        assert folder.gateway_journal.read_bytes() == b"tokens"
        folder.controller_journal.touch()


def test_resuming_with_what_would_have_decided_otherwise(run_file: Path):
    folder = RunFolder.create(run_file.parent / "runs", "run", run_file.read_text())
    folder.controller_journal.touch()
    code, error = qwengyre("train", "--resume", folder.path, "--set", "scheduler.num_cells=2")
    assert code == 2 and error.startswith("error: scheduler.num_cells: a run is resumed with the value it began with, ")


def test_resuming_a_run_that_has_finished_gives_its_report(run_file: Path):
    folder = RunFolder.create(run_file.parent / "runs", "run", run_file.read_text())
    folder.controller_journal.touch()
    with Metrics(folder) as metrics:
        metrics.record(RunEnded(1.0, FINISHED))
        metrics.record(CountsSampled(1.0, {}))
    code, _ = qwengyre("train", "--resume", folder.path)
    assert code == 0 and folder.report.is_file()


def test_resuming_a_run_that_goes_on_leaves_its_records_alone(tmp_path: Path):
    kit = RunKit(tmp_path)
    folder = RunFolder.create(tmp_path / "runs", "run", kit.run_file.read_text())
    folder.metrics.write_text('{"type":"half a li')
    with Journal.open(folder.controller_journal, ControllerRecord):
        code, error = qwengyre("train", "--resume", folder.path)
    assert code == 2 and "another process is writing this journal" in error
    assert folder.metrics.read_text() == '{"type":"half a li'


def test_taken_port(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "run", "")
    with listen(0) as taken:
        code, error = qwengyre("dashboard", folder.path, "--port", taken.getsockname()[1])
    assert code == 2
    assert "Address already in use" in error and "--port" in error
    with pytest.raises(ConfigError, match="ports go from 0 to 65535"):
        listen(65536)
