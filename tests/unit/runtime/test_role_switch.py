"""A cell between two roles: every phase is timed, and one that fails ends this life of the cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.cell import api
from qwengyre.cell.cell import CellProcess, CellSpec
from qwengyre.cell.kinds import CellParts
from qwengyre.core.errors import CellFailed, EngineError, StaleRead, TrainerError
from qwengyre.engines.config import EngineConfig
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.config import TransferConfig

SNAPSHOT = Exposure("shm", "weights", (), 3, 0, 0)
THERE, BACK = api.EnterTraining(), api.EnterRollout(SNAPSHOT, 3)


class Station:
    """An engine and a trainer whose methods fail as they are told, and do nothing otherwise."""

    def __init__(self, **errors: Exception):
        self.errors = errors

    def offload_trainer(self) -> None:
        self._do("offload_trainer")

    def restore_trainer(self) -> None:
        self._do("restore_trainer")

    async def offload_engine(self) -> None:
        self._do("offload_engine")

    async def restore_engine(self, snapshot: Exposure, version: int) -> None:
        assert (snapshot, version) == (SNAPSHOT, 3)
        self._do("restore_engine")

    def _do(self, phase: str) -> None:
        if error := self.errors.get(phase):
            raise error


class Engine(ScriptedEngine):
    def __init__(self, station: Station):
        super().__init__()
        self.offload, self.restore = station.offload_engine, station.restore_engine


class Trainer:
    def __init__(self, station: Station):
        self.offload, self.restore = station.offload_trainer, station.restore_trainer


async def switch(station: Station, *operations: api.Operation) -> dict[str, float]:
    """Phases of all operations on a cell made of `station`, which starts well."""
    errors, station.errors = station.errors, {}
    cell = CellProcess(SPEC, lambda *_: CellParts(Engine(station), Trainer(station)))
    station.errors, phases_s = errors, {}
    try:
        for operation in operations:
            phases_s |= (await cell.handle(api.CellRequest(0, operation))).phases_s
    finally:
        await cell.close()
    return phases_s


SPEC = CellSpec(
    cell=2,
    incarnation=0,
    model_dir=str(Path("unused")),
    segment_prefix="qg-switch",
    secret=b"",
    threads=1,
    engine=EngineConfig(),
    trainer=TrainerConfig(),
    collective_timeout_s=1.0,
    has_trainer=True,
    transfer=TransferConfig(transport="shm"),
)


async def test_every_phase_is_timed_in_the_order_of_the_switch():
    phases_s = await switch(Station(), THERE, BACK)
    assert list(phases_s) == ["offload_engine", "restore_trainer", "offload_trainer", "restore_engine"]
    assert all(seconds >= 0 for seconds in phases_s.values())


@pytest.mark.parametrize("phase", ["offload_engine", "restore_trainer", "offload_trainer", "restore_engine"])
@pytest.mark.parametrize("error", [EngineError("a call runs"), TrainerError("no memory")])
async def test_a_phase_that_fails_ends_this_life_and_is_named(phase: str, error: Exception):
    with pytest.raises(CellFailed, match=f"phase {phase} .* failed: {error}"):
        await switch(Station(**{phase: error}), THERE, BACK)


async def test_a_snapshot_that_is_gone_asks_for_another_one():
    with pytest.raises(StaleRead):
        await switch(Station(restore_engine=StaleRead("was released")), THERE, BACK)
