"""What `qwengyre init` writes for a harness starts it: one execution in a sandbox, whose agent solves the first task. Part of `make test-harnesses`.

The command, what is readable and the variables are those of the run file that was written; only the policy is a scripted one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checks.harness_table import INSTALLED, NODE, tools
from checks.scripted_policy import MAIN, Said, Script, ScriptedPolicy
from qwengyre.cli import run_task
from qwengyre.cli.main import application
from qwengyre.cli.starter_harnesses import HARNESSES, OWN
from qwengyre.engines.api import Serving
from qwengyre.runtime.check import mistakes_in
from qwengyre.runtime.run_config import load_run
from qwengyre.sandbox.task import load_task
from qwengyre.testing.tokenizers import write_byte_tokenizer

BASH = {
    OWN: ("bash", {}),
    "claude-code": ("Bash", {"description": "Run it"}),
    "codex": ("exec_command", None),
    "qwen-code": ("run_shell_command", {"is_background": False, "description": "Run it"}),
    "opencode": ("bash", {"description": "Run it"}),
    "mini-swe-agent": ("bash", {}),
}
"""By harness: its tool that runs a command, and what else that wants to be told."""
PLACES = (NODE / ".bin", NODE / "opencode-linux-x64" / "bin", INSTALLED / "mini-swe-agent" / "bin")
CONTEXT_TOKENS = 1 << 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [OWN, *HARNESSES])
def test_the_harness_solves_a_task_as_it_was_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", ":".join([*map(str, PLACES), os.environ["PATH"]]))
    monkeypatch.chdir(tmp_path)
    words = ["init", "mine", "--harness", name, "--model", str(write_byte_tokenizer(tmp_path / "model"))]
    written = CliRunner().invoke(application(words), words)
    assert written.exit_code == 0 and "is not on this machine" not in written.output, written.output
    monkeypatch.chdir(tmp_path / "mine")
    config = load_run("run.toml")
    about = [error for error in map(str, mistakes_in(config)) if "harness." in error or "readable" in error]
    assert not about, about

    folder = tmp_path / "mine" / "tasks" / "train" / "sum-orders"
    (folder / "instruction.md").write_text(f"{MAIN} {(folder / 'instruction.md').read_text()}")
    solution = (folder / "solution" / "solve.sh").read_text().strip()
    tool, more = BASH[name]
    arguments = {"cmd": solution} if more is None else {"command": solution, **more}
    end = [(tool, json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))] if name == "mini-swe-agent" else []
    policy = ScriptedPolicy(Script((tools((tool, json.dumps(arguments))), tools(*end)), (), "(?!)"), dict[bytes, Said]())

    @contextlib.asynccontextmanager
    async def engine(trial: run_task.Trial) -> AsyncIterator[tuple[Serving, int]]:
        yield policy, CONTEXT_TOKENS

    monkeypatch.setattr(run_task, "_engine", engine)
    trial = run_task._trial(
        folder,
        Path("run.toml"),
        ["gateway.renderer.name=qwen3", f"gateway.max_context_tokens={CONTEXT_TOKENS}"],
        tmp_path / "kept",
    )
    (tmp_path / "kept").mkdir()
    assert trial.task == load_task(folder)
    outcome = asyncio.run(run_task._run(trial))
    assert (outcome.end.value, outcome.score) == ("exited", 1.0), outcome
