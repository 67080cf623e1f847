"""Which engine and trainer a cell gets."""

from __future__ import annotations

import msgspec
import pytest

from qwengyre.cell.home import Home
from qwengyre.cell.kinds import build_parts
from qwengyre.core.errors import ConfigError
from qwengyre.engines.config import EngineConfig
from qwengyre.paced.engine import PacedEngine
from qwengyre.paced.trainer import PacedTrainer
from qwengyre.testing.paced import PLAN
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.transports import TransportPlace


@pytest.fixture
def build(tmp_path, prefix):
    place = TransportPlace(TransferConfig(transport="shm"), prefix, "127.0.0.1")
    transport = place.open()
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(PLAN))
    model = write_byte_tokenizer(tmp_path / "model")

    def make(kind: str, trainer: TrainerConfig | None):
        plan = str(tmp_path / "plan.json") if kind == "paced" else ""
        return build_parts(model, EngineConfig(engine=kind, paced_plan=plan), trainer, Home(transport, place, 1, b"secret"))

    yield make
    transport.close()


def test_paced_cell_trains_and_serves(build):
    engine, trainer = build("paced", TrainerConfig())
    assert isinstance(engine, PacedEngine)
    assert isinstance(trainer, PacedTrainer)
    assert list(trainer.publishable()) == ["weights"]


def test_standalone_engine_has_no_trainer(build):
    engine, trainer = build("paced", None)
    assert isinstance(engine, PacedEngine) and trainer is None


def test_engine_that_no_cell_can_have(build):
    with pytest.raises(ConfigError, match="scripted"):
        build("scripted", TrainerConfig())
