"""How executions end: everything in their sandbox dies, and nothing of them stays."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import GatewayAddress
from qwengyre.testing.sandbox_kit import HELLO, WAIT, Kit, calls, processes_with, spec, wait_for_the_end_of
from tests.clock import put_forward

pytestmark = pytest.mark.integration

TIMEOUT_S = 3600.0
"""Of a harness; no machine is so slow that it passes by itself."""


def test_a_good_end_leaves_nothing_behind(kit, start):
    outcome = kit.run(kit.task(HELLO), kit.config(start))
    assert (outcome.end, outcome.score, outcome.exit_code) == (End.EXITED, 0.75, 0)
    assert not list((kit.folder / "work").glob("e0*")) and not (kit.folder / "failed").exists()


DAEMON = """
    import subprocess
    command = ["bash", "-c", "(setsid {sleep} &) ; echo up; exec {sleep}"]
    subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()
    open("hello", "w").close()
"""


def daemon(kit, stay: bool):
    return kit.task(textwrap.dedent(DAEMON.format(sleep=kit.sleep)) + (WAIT if stay else ""))


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_everything_dies_with_the_harness(kit, start, isolation):
    outcome = kit.run(daemon(kit, stay=False), kit.config(start, isolation=isolation))
    assert (outcome.end, outcome.score) == (End.EXITED, 0.75)
    assert processes_with(kit.sleep) == []


async def run_out_of_time(kit: Kit, config: HarnessConfig) -> Outcome:
    """One execution that waits until `TIMEOUT_S` have passed."""

    async with kit.launcher(config) as launcher:
        running = asyncio.ensure_future(launcher.run_execution(spec(daemon(kit, stay=True)), calls(1)))
        await kit.waiting.wait()
        assert processes_with(kit.sleep)
        put_forward(TIMEOUT_S)
        return await running


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
async def test_a_harness_timeout_kills_all_and_scores_the_workspace(kit, start, isolation):
    config = kit.config(start, isolation=isolation, timeout_s=TIMEOUT_S, overall_timeout_s=2 * TIMEOUT_S)
    outcome = await run_out_of_time(kit, config)
    assert (outcome.end, outcome.validity, outcome.score) == (End.HARNESS_TIMEOUT, Validity.VALID, 0.75)
    assert processes_with(kit.sleep) == []


async def test_an_overall_timeout_drops(kit, start):
    outcome = await run_out_of_time(kit, kit.config(start, timeout_s=2 * TIMEOUT_S, overall_timeout_s=TIMEOUT_S))
    assert (outcome.end, outcome.validity, outcome.score, outcome.scored_state) == (
        End.OVERALL_TIMEOUT,
        Validity.DROPPED,
        0.0,
        "",
    )
    assert "overall_timeout_s" in outcome.detail and processes_with(kit.sleep) == []


async def test_cancelling_kills_everything(kit, start):
    async with kit.launcher(kit.config(start)) as launcher:
        running = asyncio.ensure_future(launcher.run_execution(spec(daemon(kit, stay=True)), calls(1)))
        await kit.waiting.wait()
        assert processes_with(kit.sleep)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (processes_with(kit.sleep), running.cancelled()) == ([], True)
    assert not list((kit.folder / "work").glob("e0*"))


def test_everything_dies_with_a_killed_launcher(kit, start):
    task = daemon(kit, stay=True)
    script = f"""
import asyncio
from pathlib import Path
from qwengyre.sandbox.task import load_task
from qwengyre.testing.sandbox_kit import Kit, calls, spec
kit = Kit(Path({str(kit.folder)!r}))
async def main():
    async with kit.launcher(kit.config({start!r})) as launcher:
        running = asyncio.ensure_future(launcher.run_execution(spec(load_task(Path({task.folder!r}))), calls(1)))
        await kit.waiting.wait()
        print("up", flush=True)
        await running
asyncio.run(main())
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "up\n"
    assert processes_with(kit.sleep)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_for_the_end_of(kit.sleep)


def test_a_harness_that_never_calls_is_dropped_and_says_why(kit, start):
    outcome = kit.run(kit.task("sys.exit('no model configured')"), kit.config(start), num_calls=0)
    assert (outcome.end, outcome.validity) == (End.NEVER_CALLED, Validity.DROPPED)
    assert "without a model call" in outcome.detail and "no model configured" in outcome.detail


async def test_thirty_executions_at_once(kit, start):
    code = "import os, urllib.request; urllib.request.urlopen(os.environ['OPENAI_BASE_URL']); open('hello', 'w')"

    async with kit.launcher(kit.config(start)) as launcher:
        task = kit.task(code)
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(launcher.run_execution(spec(task, f"e{i:06d}-0"), calls(1))) for i in range(30)]
    outcomes = [run.result() for run in runs]
    assert {(outcome.end, outcome.score) for outcome in outcomes} == {(End.EXITED, 0.75)}
    assert len({outcome.scored_state for outcome in outcomes}) == 1 and len(kit.requests) == 30


async def test_a_gateway_that_is_started_again_is_found(kit, start):
    code = """
        urllib.request.urlopen(os.environ["OPENAI_BASE_URL"])
        open("hello", "w").close()
    """

    async with kit.launcher(kit.config(start)) as launcher:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(launcher.run_execution(spec(kit.task(WAIT + textwrap.dedent(code))), calls(2)))
            await kit.waiting.wait()
            os.unlink(launcher.gateways[0].socket)
            again = await asyncio.start_unix_server(kit.answer, launcher.gateways[0].socket)
            kit.go.set()
        again.close()
    outcome = running.result()
    assert (outcome.end, outcome.score, len(kit.requests)) == (End.EXITED, 0.75, 2), outcome.detail


async def test_a_dead_zygote_is_replaced(kit):
    async with kit.launcher(kit.config("warm")) as launcher:
        task = kit.task(HELLO)
        first = await launcher.run_execution(spec(task), calls(1))
        os.kill(launcher._warm._process.pid, signal.SIGKILL)
        while launcher._warm._control is not None:
            await asyncio.sleep(0)
        assert {first.end, (await launcher.run_execution(spec(task), calls(1))).end} == {End.EXITED}


def test_a_full_disk_stops_the_run_with_a_sentence(kit, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qwengyre.sandbox.launcher.prepare_workspace", full)
    with pytest.raises(SandboxError, match=r"no space left for workspaces in .* MB free\): free some, and resume the run"):
        kit.run(kit.task(HELLO))


async def test_a_sandbox_that_cannot_be_made_is_a_failed_setup(kit, start):
    async with kit.launcher(kit.config(start)) as launcher:
        launcher.gateways = [GatewayAddress(str(kit.folder / "no such folder" / "harness.sock"))]
        outcome = await launcher.run_execution(spec(kit.task(HELLO)), calls(0))
    assert (outcome.end, outcome.validity, outcome.score) == (End.SETUP_FAILED, Validity.PLACEHOLDER, 0.0)
    assert "no such folder" in outcome.detail
