"""Which engine and which trainer a cell has: the one place that knows the kinds. Each is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qwengyre.core.errors import ConfigError
from qwengyre.engines.api import Engine
from qwengyre.engines.config import EngineConfig
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.api import Carrier

if TYPE_CHECKING:
    from qwengyre.trainer.members import Members
    from qwengyre.trainer.paced import PacedMembers, PacedTrainer
    from qwengyre.trainer.trainer import Trainer


class Stations(NamedTuple):
    engine: Engine
    trainer: Trainer | PacedTrainer
    connect_members: Callable[[int, int, str, int, float], Members | PacedMembers]
    """(rank, world, store address, membership epoch, timeout in seconds)"""
    publishable: Callable[[], dict[str, Any]]
    """The arrays of a publish."""


def build_stations(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig, carrier: Carrier, threads: int) -> Stations:
    """Raises ConfigError for a kind of engine that no cell can have."""
    match engine.engine:
        case "embedded":
            return _embedded(model_dir, engine, trainer, carrier, threads)
        case "paced":
            return _paced(model_dir, engine, carrier)
    raise ConfigError(f"a cell cannot have the engine {engine.engine!r}", key="engine.engine")


def _embedded(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig, carrier: Carrier, threads: int) -> Stations:
    import torch

    from qwengyre.engines.embedded import EmbeddedEngine
    from qwengyre.trainer.members import Members
    from qwengyre.trainer.trainer import Trainer

    torch.set_num_threads(threads)
    made = Trainer(model_dir, trainer, carrier)
    return Stations(EmbeddedEngine(model_dir, carrier, engine), made, Members.connect, made.flat.arrays)


def _paced(model_dir: Path, engine: EngineConfig, carrier: Carrier) -> Stations:
    from tokenizers import Tokenizer

    from qwengyre.engines.paced import PacedEngine
    from qwengyre.engines.paced_plan import PacedPlan
    from qwengyre.trainer.paced import PacedMembers, PacedTrainer

    plan = PacedPlan.read(engine.paced_plan)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    made = PacedTrainer(plan, carrier)
    return Stations(PacedEngine(plan, tokenizer, carrier, engine), made, PacedMembers.connect, made.arrays_to_publish)
