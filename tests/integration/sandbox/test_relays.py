"""A relay for each sandbox: what one harness does to its own reaches no other, and what dies of ours costs no score."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Awaitable, Callable

import pytest

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.process import children
from qwengyre.testing.sandbox_kit import HELLO, WAIT, Kit, calls, spec

pytestmark = pytest.mark.integration

CALL = "import os, urllib.request\nurllib.request.urlopen(os.environ['OPENAI_BASE_URL'])\n"
FLOOD = """
    import http.client, os, socket
    first = http.client.HTTPConnection("127.0.0.1", 8377)
    first.connect()
    kept = []
    for _ in range(900):
        try:
            kept.append(socket.create_connection(("127.0.0.1", 8377)))
        except OSError:
            break
    first.request("GET", "/wait")
    first.getresponse().read()
"""
"""Opens all connections that it may, then says over its first one that they are open, and waits."""


@pytest.mark.parametrize("open_files", [1024, 24])
@pytest.mark.parametrize("closed", [True, False])
async def test_idle_connections_of_one_harness_end_no_relay(kit, start, open_files, closed):
    """The others are served, and so is the harness itself once it has closed them."""
    close = f"for one in (first, *kept):\n    one.close()\n{CALL}"
    flooder = textwrap.dedent(FLOOD) + (close if closed else "") + HELLO

    async with kit.launcher(kit.config(start, limits={"open_files": open_files})) as launcher, asyncio.TaskGroup() as group:
        first = group.create_task(launcher.run_execution(spec(kit.task(flooder)), calls(1)))
        await kit.waiting.wait()
        other = kit.task(f"{CALL}{HELLO}")
        others = [await launcher.run_execution(spec(other, f"e00000{n}-0"), calls(1)) for n in (2, 3)]
        kit.go.set()
    outcomes = [first.result(), *others]
    assert [(one.end, one.score) for one in outcomes] == [(End.EXITED, 0.75)] * 3, [one.detail for one in outcomes]


async def lose(kit: Kit, kill: Callable[[Launcher], Awaitable[None]], num: int = 2) -> tuple[list[Outcome], Outcome]:
    """Outcomes of executions that were running when something was killed, and of one that was started afterwards."""

    async with kit.launcher(kit.config("warm")) as launcher:
        task = kit.task(f"{HELLO}\n{WAIT}")
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(launcher.run_execution(spec(task, f"e{n:06d}-0"), calls(1))) for n in range(num)]
            while sum(b"/wait " in head for head in kit.requests) < num:
                await asyncio.sleep(0.01)
            await kill(launcher)
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            kit.go.set()
        return [one.result() for one in running], await launcher.run_execution(spec(kit.task(f"{CALL}{HELLO}")), calls(1))


def relays_of(launcher: Launcher) -> int:
    """The process that forks relays: the first child of the zygote."""
    return children(launcher._warm._process.pid)[0]


async def kill_zygote(launcher: Launcher) -> None:
    os.kill(launcher._warm._process.pid, signal.SIGKILL)


async def kill_relays(launcher: Launcher) -> None:
    os.kill(relays_of(launcher), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_zygote, kill_relays])
async def test_harnesses_are_lost_with_what_they_need_and_not_scored(kit, kill):
    lost, after = await lose(kit, kill)
    assert [(one.end, one.validity, one.score) for one in lost] == [(End.LOST, Validity.DROPPED, 0.0)] * 2
    assert "the process that harnesses are forked from died" in lost[0].detail
    assert (after.end, after.score) == (End.EXITED, 0.75), after.detail


async def test_a_relay_that_dies_costs_its_own_execution_alone(kit):
    async def kill_one(launcher: Launcher) -> None:
        os.kill(children(relays_of(launcher))[0], signal.SIGKILL)

    lost, after = await lose(kit, kill_one)
    assert sorted((one.end.value, one.score) for one in lost) == [("exited", 0.75), ("lost", 0.0)]
    assert after.score == 0.75


async def test_no_relay_outlives_its_harness(kit):
    async with kit.launcher(kit.config("warm")) as launcher:
        await launcher.run_execution(spec(kit.task(f"{CALL}{HELLO}")), calls(1))
        while children(relays_of(launcher)):
            await asyncio.sleep(0.01)


async def test_what_never_stays_alive_ends_with_a_word(kit):
    """A zygote that cannot be started again is no loss: the next start says why."""

    async with kit.launcher(kit.config("warm")) as launcher:
        (kit.modules / "qwengyre_probe_harness.py").write_text("raise RuntimeError('broken since')")
        os.kill(launcher._warm._process.pid, signal.SIGKILL)
        while launcher._warm._control is not None:
            await asyncio.sleep(0)
        outcome = await launcher.run_execution(spec(kit.task(HELLO)), calls(1))
    assert outcome.end is End.SETUP_FAILED and "broken since" in outcome.detail
