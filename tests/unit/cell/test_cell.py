"""What a cell says of itself, with an engine that is a fake."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from qwengyre.cell import api
from qwengyre.cell.cell import CellProcess, CellSpec
from qwengyre.cell.kinds import CellParts
from qwengyre.core.errors import CellFailed, EngineError, TrainerError
from qwengyre.engines.api import Capacity, EngineStats
from qwengyre.engines.config import EngineConfig
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.config import TransferConfig

SNAPSHOT = Exposure("shm", "weights", (), 0, 0, 0)


class FakeEngine:
    def __init__(self) -> None:
        self.now = EngineStats(1, 2, 3, 0, 0, 0.5)

    def stats(self) -> EngineStats:
        return self.now

    def capacity(self) -> Capacity:
        return Capacity(0, 0)

    async def close(self) -> None: ...


def spec_in(folder: Path, prefix: str) -> CellSpec:
    return CellSpec(
        cell=1,
        incarnation=0,
        model_dir=str(folder),
        segment_prefix=prefix,
        secret=b"t",
        threads=1,
        engine=EngineConfig(),
        trainer=TrainerConfig(),
        collective_timeout_s=1.0,
        has_trainer=False,
        transfer=TransferConfig(transport="shm"),
        host="127.0.0.1",
    )


async def test_a_cell_whose_engine_ended_by_itself_is_not_well(tmp_path, prefix):
    """Its process lives and answers; calls that are sent there would wait for nothing."""
    engine = FakeEngine()
    cell = CellProcess(spec_in(tmp_path, prefix), lambda *_: CellParts(engine, None))

    assert (await cell.handle(api.CellRequest(0, api.Health()))).engine == engine.now
    engine.now = msgspec.structs.replace(engine.now, failure="its thread died")
    with pytest.raises(CellFailed, match="its thread died"):
        await cell.handle(api.CellRequest(0, api.Health()))
    await cell.close()


async def test_an_engine_whose_weights_are_elsewhere_takes_none(tmp_path, prefix):
    """A completions server: it serves a run without steps."""
    cell = CellProcess(spec_in(tmp_path, prefix), lambda *_: CellParts(FakeEngine(), None))

    with pytest.raises(EngineError, match="weights of this engine are elsewhere"):
        await cell.handle(api.CellRequest(0, api.UpdateWeights(SNAPSHOT, 1)))
    await cell.close()


TRAINING = [
    api.OfferStore(),
    api.ConnectMembers(0, "", (1,)),
    api.EnterTraining(),
    api.EnterRollout(SNAPSHOT, 0),
    api.BeginStep(0, None),
    api.Reduce(1),
    api.Apply(1),
    api.ExposeSnapshot(0, is_publish=True),
    api.SaveSnapshot("", 0),
    api.LoadCheckpoint(""),
    api.Audit((), ""),
]


@pytest.mark.parametrize("operation", TRAINING, ids=lambda operation: type(operation).__name__)
async def test_a_standalone_engine_refuses_by_name_what_is_for_a_trainer_and_touches_nothing(tmp_path, prefix, operation):
    engine = FakeEngine()  # any use of it would be an AttributeError
    cell = CellProcess(spec_in(tmp_path, prefix), lambda *_: CellParts(engine, None))

    with pytest.raises(TrainerError, match=f"a standalone engine has no trainer: {type(operation).__name__}"):
        await cell.handle(api.CellRequest(0, operation))
    await cell.close()
