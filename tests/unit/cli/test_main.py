from __future__ import annotations

import errno
import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import qwengyre
from qwengyre.cli import main as cli
from qwengyre.core.errors import ConfigError
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import Metrics
from qwengyre.telemetry.records import FINISHED, RunEnded
from qwengyre.trainer.checkpoint import META, place
from tests.integration.run_kit import RunKit


def run(*arguments: str):
    return CliRunner().invoke(cli.application(list(arguments)), list(arguments))


def program(monkeypatch: pytest.MonkeyPatch, function) -> None:
    monkeypatch.setattr(cli, "_load", lambda target: function)


def test_help_lists_every_command_and_imports_none_of_them():
    code = "import sys; from qwengyre.cli.main import main; sys.argv = ['qwengyre', '--help']\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m in ('torch', 'numpy', 'transformers') or m.startswith('qwengyre.runtime')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [("--version",), ("--debug", "--version"), ("--version", "train")], ids=" ".join)
def test_version_needs_no_command(arguments: tuple[str, ...]):
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"qwengyre {qwengyre.__version__}\n", "")


def test_the_version_is_that_of_the_package():
    assert qwengyre.__version__ == importlib.metadata.version("qwengyre")


def test_an_error_of_the_user_is_one_line_on_stderr_and_exit_code_2(monkeypatch: pytest.MonkeyPatch):
    def train() -> None:
        raise ConfigError("no such key. Did you mean scheduler.phi?", file="run.toml", line=3, key="scheduler.phj")

    program(monkeypatch, train)
    result = run("train")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: run.toml:3: scheduler.phj: no such key. Did you mean scheduler.phi?\n"


def test_errors_out_of_a_task_group_are_opened(monkeypatch: pytest.MonkeyPatch):
    def train() -> None:
        raise ExceptionGroup("tasks", [ConfigError("port 80 is taken"), ExceptionGroup("inner", [ConfigError("disk full")])])

    program(monkeypatch, train)
    assert run("train").stderr.splitlines() == ["error: port 80 is taken", "error: disk full"]


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def train() -> None:
        raise ExceptionGroup("tasks", [ConfigError("port 80 is taken"), KeyError("bug")])

    program(monkeypatch, train)
    assert isinstance(run("train").exception, ExceptionGroup)


def test_debug_keeps_the_traceback_of_a_user_error(monkeypatch: pytest.MonkeyPatch):
    def train() -> None:
        raise ConfigError("wrong")

    program(monkeypatch, train)
    assert isinstance(run("--debug", "train").exception, ConfigError)


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    def train() -> None:
        raise KeyboardInterrupt

    program(monkeypatch, train)
    result = run("train")
    assert (result.exit_code, result.stderr) == (130, "stopped\n")


def test_a_group_finds_its_commands(monkeypatch: pytest.MonkeyPatch):
    def check(folder: str) -> None:
        typer.echo(f"checked {folder}")

    targets = {"qwengyre.cli.tasks:COMMANDS": {"check": ("somewhere:check", "Check."), "other": ("somewhere:other", "Other.")}}
    monkeypatch.setattr(cli, "_load", lambda target: targets.get(target, check))
    assert run("tasks", "check", "x").stdout == "checked x\n"


def test_a_misspelt_command_names_the_nearest():
    result = run("trian")
    assert result.exit_code == 2
    assert "Did you mean 'train'" in result.stderr


def test_config_check_prints_the_config_as_resolved_and_all_mistakes(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[tasks]\ntrain = 'a'\n[harness]\ncommand = ['agent']\n[trainer]\nbeta1 = 0.5\n")
    result = run("config", "check", str(path), "--show", "--set", "trainer.beta2=0.6")
    assert "beta1 = 0.5\nbeta2 = 0.6\n" in result.stdout and f'train = "{Path.cwd()}/a"' in result.stdout
    assert result.exit_code == 2
    assert "this folder of tasks does not exist" in result.stderr and "harness.command: agent does not exist" in result.stderr


def test_config_check_looks_for_the_command_where_no_limits_can_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("qwengyre.sandbox.host.find_cgroup_parent", lambda name: None)
    path = tmp_path / "run.toml"
    path.write_text("[tasks]\ntrain = 'a'\n[harness]\ncommand = ['agent']\n")
    result = run("config", "check", str(path))
    assert result.exit_code == 2
    assert "harness.command: agent does not exist" in result.stderr
    assert "this user may make no cgroups" in result.stderr


def test_config_check_says_ok_and_what_is_worth_knowing(tmp_path: Path):
    run_file = RunKit(tmp_path).run_file
    result = run("config", "check", str(run_file), "--set", "policy.max_context_tokens=4096")
    assert (result.exit_code, result.stderr) == (0, "")
    ok, size, *notes = result.stdout.splitlines()
    assert ok == f"{run_file}: ok" and size.startswith("  3 tasks to train on, 2 held out; ")
    assert any(note.startswith("  note: contexts have at most 1,024 tokens: engine.max_context_tokens") for note in notes)
    assert len(notes) < 5, "the whole configuration is for --show"
    assert "[trainer]" in run("config", "check", str(run_file), "--show").stdout


def test_config_check_tells_what_is_wrong_in_the_file_and_what_is_wrong_around_it(tmp_path: Path):
    run_file = RunKit(tmp_path).run_file
    changes = (
        "scheduler.stepz=3",
        "trainer.beta1=x",
        "engine.dtype=bfloat17",
        "policy.model=/no/such/model",
        "policy.temperature=0",
    )
    result = run("config", "check", str(run_file), *(part for change in changes for part in ("--set", change)))
    assert result.exit_code == 2 and result.stdout == ""
    for part in (
        "scheduler.stepz: no such key. Did you mean scheduler.steps?",
        "trainer.beta1: expected float, got 'x' (str)",
        "engine.dtype: expected one of",
        "policy.temperature: temperature must be above 0",
        "policy.model: /no/such/model does not exist",
    ):
        assert result.stderr.count(part) == 1, part
    assert len(result.stderr.splitlines()) == 5


def test_config_explain_of_an_unknown_table_lists_the_tables():
    assert "trainer" in run("config", "explain", "nothing").stderr


def test_train_wants_a_run_file_or_a_run_to_resume():
    assert "give either a run file or --resume RUN" in run("train").stderr


def test_train_does_not_resume_what_is_no_run(tmp_path: Path):
    assert "not the folder of a run" in run("train", "--resume", str(tmp_path)).stderr


@pytest.mark.parametrize("key", ["scheduler.groups_per_step", "scheduler.num_cells", "evaluation.samples", "gateway.processes"])
def test_a_change_that_a_finished_run_cannot_take_is_refused_and_not_ignored(tmp_path: Path, key: str):
    folder = RunFolder.create(tmp_path, "run", RunKit(tmp_path / "kit").run_file.read_text())
    with Metrics(folder) as metrics:
        metrics.record(RunEnded(1.0, FINISHED))
    Journal.open(folder.controller_journal, ControllerRecord).close()
    for step in (2, 10):
        place(folder.checkpoints, step).mkdir()
        (place(folder.checkpoints, step) / META).write_text("{}")
    told = " ".join(run("train", "--resume", str(folder.path)).stdout.split())
    assert "has finished" in told and f"qwengyre train {folder.config} --set policy.model={place(folder.checkpoints, 10)}" in told
    result = run("train", "--resume", str(folder.path), "--set", f"{key}=12")
    assert result.exit_code == 2 and f"{key}: a run is resumed with the value it began with" in result.stderr


@pytest.mark.parametrize(
    "option, least",
    [("--temperature", 0), ("--max-context-tokens", 1)],
)
def test_gateway_refuses_numbers_that_no_call_can_have(tmp_path: Path, option: str, least: int):
    result = run("gateway", "--engine", "http://127.0.0.1:1/v1", "--model", str(tmp_path), option, str(least - 1))
    assert result.exit_code == 2
    assert f"'{option}': Input should be greater than or equal to {least}" in " ".join(result.stderr.replace("│", "").split())


def test_what_the_machine_refuses_is_a_word_and_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def train() -> None:
        raise ExceptionGroup("tasks", [PermissionError(errno.EACCES, "Permission denied", "runs/a/journal")])

    program(monkeypatch, train)
    result = run("train")
    assert (result.exit_code, result.stderr) == (2, "error: runs/a/journal: Permission denied\n")
    program(monkeypatch, lambda: Path("/no/such/file/of/ours").read_text())
    assert isinstance(run("train").exception, FileNotFoundError)


@pytest.mark.parametrize("ignored", [False, True], ids=["as a foreground job", "with SIGINT ignored"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_run_that_is_terminated_is_cleared_away_as_after_ctrl_c(number: signal.Signals, ignored: bool):
    code = f"""
import asyncio, signal
from qwengyre.cli.train import stop_as_ctrl_c_does
signal.signal(signal.SIGINT, signal.{"SIG_IGN" if ignored else "default_int_handler"})
signal.signal({int(number)}, signal.SIG_DFL)  # nohup would have it ignored
async def run():
    try:
        print("up", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleared away", flush=True)
stop_as_ctrl_c_does()
try:
    asyncio.run(run())
except KeyboardInterrupt:
    print("stopped")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read().splitlines() == ["cleared away", "stopped"]
