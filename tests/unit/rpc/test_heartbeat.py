"""When a process counts as lost, by fakes."""

from __future__ import annotations

import asyncio

import pytest

from qwengyre.core.errors import CellFailed, EngineUnavailable, Unreachable
from qwengyre.rpc.heartbeat import HEARTBEATS_PER_ANSWER, MISSES_UNTIL_LOST, wait_lost

HEARTBEAT_S = 1e-6


class Pings:
    """Answers by the script: an error is raised; the last entry holds for good."""

    def __init__(self, *script: Exception | None) -> None:
        self.script, self.timeouts = script, []

    async def __call__(self, timeout_s: float) -> None:
        said = self.script[min(len(self.timeouts), len(self.script) - 1)]
        self.timeouts.append(timeout_s)
        if said is not None:
            raise said


async def never_ends() -> str:
    return await asyncio.get_running_loop().create_future()


async def lost(pings: Pings) -> str:
    return await wait_lost(never_ends(), pings, HEARTBEAT_S)


@pytest.mark.parametrize(
    "error", [CellFailed(1, "its engine failed"), EngineUnavailable("its engine failed"), Unreachable("x", "its engine failed")]
)
async def test_three_misses_in_a_row_are_a_loss_with_the_last_reason(error: Exception):
    pings = Pings(error)
    assert (await lost(pings)).startswith("it missed its heartbeats: ") and "its engine failed" in await lost(pings)
    pings = Pings(error)
    await lost(pings)
    assert pings.timeouts == [HEARTBEAT_S * HEARTBEATS_PER_ANSWER] * MISSES_UNTIL_LOST


async def test_only_misses_in_a_row_count():
    missed = (Unreachable("x", "late"),) * (MISSES_UNTIL_LOST - 1)
    pings = Pings(*missed, None, *missed, None, Unreachable("x", "gone"))
    assert "gone" in await lost(pings)
    assert len(pings.timeouts) == 3 * MISSES_UNTIL_LOST


async def test_a_bug_of_ours_is_the_reason_at_once():
    pings = Pings(ValueError("a bug"))
    assert await lost(pings) == "a bug" and len(pings.timeouts) == 1


async def test_an_end_is_told_before_any_heartbeat_is_due():
    async def ends() -> str:
        return "its process ended with -9"

    pings = Pings(None)
    assert await wait_lost(ends(), pings, 600.0) == "its process ended with -9"
    assert pings.timeouts == []
