"""Which engine and trainer a cell gets."""

from __future__ import annotations

import msgspec
import pytest

from qwengyre.cell.kinds import Home, build_stations
from qwengyre.cell.ranks.rendezvous import Meeting
from qwengyre.core.errors import ConfigError, TrainerError
from qwengyre.engines.config import EngineConfig
from qwengyre.paced.engine import PacedEngine
from qwengyre.paced.trainer import PacedTrainer
from qwengyre.testing.paced import PLAN
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.carriers import CarrierPlace
from qwengyre.transfer.config import TransferConfig


@pytest.fixture
def build(tmp_path, prefix):
    place = CarrierPlace(TransferConfig(carrier="shm"), prefix, "127.0.0.1")
    carrier = place.open()
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(PLAN))
    model = write_byte_tokenizer(tmp_path / "model")

    def make(kind: str, trainer: TrainerConfig | None):
        plan = str(tmp_path / "plan.json") if kind == "paced" else ""
        return build_stations(model, EngineConfig(engine=kind, paced_plan=plan), trainer, Home(carrier, place, 1, Meeting()))

    yield make
    carrier.close()


def test_paced_cell_trains_and_serves(build):
    stations = build("paced", TrainerConfig())
    assert isinstance(stations.engine, PacedEngine)
    assert isinstance(stations.trainer, PacedTrainer)
    assert list(stations.publishable()) == ["weights"]


def test_standalone_engine_refuses_a_trainers_work_by_name(build):
    stations = build("paced", None)
    stations.trainer.offload()
    with pytest.raises(TrainerError, match="standalone engine has no trainer: begin_step"):
        stations.trainer.begin_step(3)
    with pytest.raises(TrainerError, match="connect_members"):
        stations.connect_members(0, 2, "", 0, 1.0)


def test_engine_that_no_cell_can_have(build):
    with pytest.raises(ConfigError, match="scripted"):
        build("scripted", TrainerConfig())
