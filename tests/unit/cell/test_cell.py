"""What a cell says of itself, with stations that are fakes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from qwengyre.cell import api
from qwengyre.cell.cell import Cell, CellSpec
from qwengyre.cell.kinds import NoTrainer, Stations
from qwengyre.core.errors import CellFailed
from qwengyre.engines.api import Capacity, EngineStats
from qwengyre.engines.config import EngineConfig
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.config import TransferConfig


class FakeEngine:
    def __init__(self) -> None:
        self.now = EngineStats(1, 2, 3, 0, 0, 0.5)

    def stats(self) -> EngineStats:
        return self.now

    def capacity(self) -> Capacity:
        return Capacity(0, 0, 0, 0, 0)

    async def close(self) -> None: ...


def test_a_cell_whose_engine_ended_by_itself_is_not_well(tmp_path, prefix):
    """Its process lives and answers; calls that are sent there would wait for nothing."""
    engine = FakeEngine()
    spec = CellSpec(
        cell=1,
        incarnation=0,
        model_dir=str(tmp_path),
        segment_prefix=prefix,
        secret=b"t",
        threads=1,
        engine=EngineConfig(),
        trainer=TrainerConfig(),
        collective_timeout_s=1.0,
        has_trainer=False,
        transfer=TransferConfig(carrier="shm"),
        host="127.0.0.1",
    )
    cell = Cell(spec, lambda *_: Stations(engine, NoTrainer(), lambda *_: SimpleNamespace(), dict))

    async def body():
        assert (await cell.handle(api.CellRequest(0, api.Health()))).engine == engine.now
        engine.now = msgspec.structs.replace(engine.now, failure="its thread died")
        with pytest.raises(CellFailed, match="its thread died"):
            await cell.handle(api.CellRequest(0, api.Health()))
        await cell.close()

    asyncio.run(body())
