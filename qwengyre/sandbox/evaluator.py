"""Score a workspace: `tests/test.sh` in a fresh sandbox, on a copy, after every process of the harness is gone.

The tests are mounted only now; the log folder that takes the reward was in no sandbox before; there is no network. What fails here
is a failure of the evaluator, never a score of 0.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import EvaluatorFailed
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.host import SandboxHost, log_tail
from qwengyre.sandbox.isolation import TESTS, VERIFIER_LOGS, WORKSPACE, Mount
from qwengyre.sandbox.limits import MIB, disk_usage
from qwengyre.sandbox.process import Process, Program, start
from qwengyre.sandbox.reward import read_reward
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.workspace import copy_workspace

SMALL_BYTES: Final = 4 * MIB
"""Copied in a few ms."""


class Verdict(msgspec.Struct, frozen=True):
    """Score, validity and state of a scored workspace. `failure` is empty when the score is valid."""

    score: float
    scored_state: str
    tries: int
    failure: str = ""


async def evaluate(host: SandboxHost, task: Task, workspace: Path, folder: Path) -> Verdict:
    """Run the evaluator until it gives a score, at most `evaluator_tries` times, each on its own copy of `workspace`.

    `folder` is the execution's; copies are removed, `verifier.log` stays. Raises SandboxError when the workspace cannot be copied.
    """
    failure, state = "", ""
    tries = host.config.evaluator_tries
    for attempt in range(1, tries + 1):
        place = folder / f"evaluation-{attempt}"
        try:
            logs = place / "verifier"
            logs.mkdir(parents=True)
            state = await _copy(workspace, place / "workspace", host.config.limits)
            score = await _run_once(host, task, place, folder / "verifier.log")
            return Verdict(score, state, attempt)
        except EvaluatorFailed as error:
            failure = str(error)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return Verdict(0.0, state, tries, f"{failure}\n{log_tail(folder / 'verifier.log')}".strip())


async def _copy(workspace: Path, target: Path, limits: LimitsConfig) -> str:
    """Copy and digest; a large workspace in a thread, so that calls of other executions do not wait for it."""
    if disk_usage(workspace, limits.files).num_bytes <= SMALL_BYTES:
        return copy_workspace(workspace, target, limits)
    return await asyncio.to_thread(copy_workspace, workspace, target, limits)


async def _run_once(host: SandboxHost, task: Task, place: Path, log: Path) -> float:
    timeout_s = host.config.verifier_timeout_s or task.verifier_timeout_s
    output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with host.cgroup(f"{place.parent.name}-{place.name}") as (_, fds):
            process = _start(host, task, place, fds, output)
            try:
                code = await process.wait(timeout_s)
            finally:
                await process.kill()
    finally:
        os.close(output)
    if code is None:
        raise EvaluatorFailed(f"tests/test.sh of {task.name} did not end within {timeout_s:g} s")
    try:
        return read_reward(place / "verifier", *task.reward_range)
    except EvaluatorFailed as error:
        raise EvaluatorFailed(f"tests/test.sh of {task.name} ended with exit code {code}, and {error}") from None


def _start(host: SandboxHost, task: Task, place: Path, fds: list[int], output: int) -> Process:
    environment = _environment(host, task, place)
    if not host.isolated:
        command = ["/bin/bash", str(task.tests / "test.sh")]
        return host.start_supervised(Program(command, environment, output, pass_fds=fds), None, str(place / "workspace"))
    mounts = (
        Mount(str(place / "workspace"), WORKSPACE, writable=True),
        Mount(str(place / "verifier"), VERIFIER_LOGS, writable=True),
        Mount(str(task.tests), TESTS),
    )
    command = host.script_command(f"{TESTS}/test.sh", fds)
    return start(host.sandboxed(host.view(mounts), Program(command, environment, output, pass_fds=fds)))


def _environment(host: SandboxHost, task: Task, place: Path) -> dict[str, str]:
    own = {
        "TESTS_DIR": TESTS if host.isolated else str(task.tests),
        "VERIFIER_DIR": VERIFIER_LOGS if host.isolated else str(place / "verifier"),
    }
    return host.environment(host.home(place)) | task.agent_env | task.verifier_env | own
