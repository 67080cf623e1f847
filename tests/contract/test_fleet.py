"""What steps and controller expect of a fleet: the real one over cells in this process, and the fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from qwengyre.cell import api
from qwengyre.core.errors import CellFailed, TrainerError
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.fleet import Fleet
from qwengyre.testing.runtime import FakeFleet, FakeGateway, FakeLauncher
from tests.contract.launchers import spec_in

NUM_CELLS, STANDALONE = 2, 2
"""Two cells, and a standalone engine that is numbered on."""


class Case(NamedTuple):
    fleet: Fleet | FakeFleet
    strike: Callable[[int], object]
    """End the present life of a cell, unasked."""
    lost: list[int]


@asynccontextmanager
async def fake(folder: Path) -> AsyncIterator[Case]:
    fleet = FakeFleet(NUM_CELLS, num_standalone=1)
    yield Case(fleet, fleet.lose, [])


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[Case]:
    launcher = FakeLauncher()

    def make_spec(cell: int, incarnation: int):
        made = spec_in(folder, cell=cell, incarnation=incarnation, has_trainer=cell < NUM_CELLS)
        return msgspec.structs.replace(made, host="127.0.0.1")

    def strike(cell: int) -> None:
        [life] = [life for life in launcher.lives if life.address == fleet.cells[cell].client.address]
        life.end("ended with -9")

    fleet = Fleet(make_spec, launcher, RuntimeConfig(heartbeat_s=3600.0), FakeGateway(), NUM_CELLS)
    for cell in range(NUM_CELLS + 1):
        await fleet.start(cell)
    yield Case(fleet, strike, [])
    await fleet.stop()
    await launcher.close()


@pytest.fixture(params=[real, fake], ids=["real", "fake"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    async with request.param(tmp_path) as made:
        made.fleet.on_lost = made.lost.append
        yield made


async def until_lost(case: Case, cell: int) -> None:
    while cell not in case.lost:
        await asyncio.sleep(0)


async def test_servers_are_numbered_on(case: Case):
    assert [case.fleet.server(number) for number in (0, 1, STANDALONE)] == ["cell-0", "cell-1", "standalone-0"]


async def test_an_operation_has_its_typed_reply(case: Case):
    report = await case.fleet.call(1, api.Health(), api.HealthReport)
    assert (report.capacity.running, report.engine.tokens_generated) == (0, 0)
    assert "address" in msgspec.structs.asdict(await case.fleet.call(0, api.OfferStore(), api.Offered))


async def test_a_cell_that_refuses_is_not_lost(case: Case):
    with pytest.raises(TrainerError, match="a standalone engine has no trainer"):
        await case.fleet.call(STANDALONE, api.EnterTraining(), api.Timed)
    assert STANDALONE in case.fleet.cells and case.lost == []


async def test_a_cell_that_ends_is_lost_once_and_can_be_started_again(case: Case):
    case.strike(1)
    await until_lost(case, 1)
    assert 1 not in case.fleet.cells
    with pytest.raises(CellFailed, match="is lost"):
        await case.fleet.call(1, api.Health(), api.HealthReport)
    await case.fleet.start(1)
    await case.fleet.call(1, api.Health(), api.HealthReport)
    assert case.lost == [1] and case.fleet.cells[1].is_serving


async def test_who_is_given_up_is_lost_with_the_reason(case: Case):
    said: list[str] = []
    case.fleet.say = said.append
    with pytest.raises(CellFailed, match="it cannot be read"):
        case.fleet.give_up(0, "it cannot be read")
    assert case.lost == [0] and said == ["cell-0: it cannot be read"]
    with pytest.raises(CellFailed):
        case.fleet.give_up(0, "again")
    assert case.lost == [0]


async def test_a_ping_tells_of_those_that_live(case: Case):
    assert len(await case.fleet.ping([0, 1, STANDALONE])) == 3
    case.strike(1)
    await until_lost(case, 1)
    assert len(await case.fleet.ping([0, 1])) == 1
    assert len(await case.fleet.engine_stats()) == 2
