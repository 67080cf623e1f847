"""How the fleet sees that a cell is lost, on lives that are fakes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from qwengyre.core.errors import CellFailed, EngineUnavailable
from qwengyre.rpc.heartbeat import MISSES_UNTIL_LOST
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.fleet import Fleet, LiveCell


class Life:
    """Never ends by itself."""

    def __init__(self) -> None:
        self.is_killed = False

    async def wait_end(self) -> str:
        await asyncio.Event().wait()
        return ""

    def kill(self) -> None:
        self.is_killed = True


class Unwell:
    """Answers every heartbeat with an error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    async def call(self, *_: object) -> None:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (CellFailed(1, "its engine failed"), MISSES_UNTIL_LOST),
        (EngineUnavailable("its engine failed"), MISSES_UNTIL_LOST),
        (ValueError("its engine failed"), 1),
    ],
)
async def test_a_cell_that_lives_and_is_not_well_is_lost_with_its_own_words(error, asked, caplog):
    fleet = Fleet(None, None, RuntimeConfig(heartbeat_s=1e-6), None, num_cells=2)
    lost: list[int] = []
    fleet.on_lost = lost.append
    live = LiveCell(SimpleNamespace(incarnation=0), Life(), Unwell(error))
    fleet.cells[1] = live
    await fleet._watch(1, live)
    assert lost == [1] and live.process.is_killed and live.client.asked == asked
    assert "its engine failed" in caplog.records[-1].reason
