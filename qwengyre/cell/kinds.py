"""Which engine and which trainer a cell has: the one place that knows the kinds. Each is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qwengyre.cell.ranks.rendezvous import Meeting
from qwengyre.core.errors import ConfigError, TrainerError
from qwengyre.engines.api import Engine
from qwengyre.engines.config import EngineConfig
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.api import Carrier
from qwengyre.transfer.carriers import CarrierPlace

if TYPE_CHECKING:
    from qwengyre.cell.ranks.trainer import RankedMembers, RankedTrainer
    from qwengyre.paced.trainer import PacedMembers, PacedTrainer
    from qwengyre.trainer.members import Members
    from qwengyre.trainer.trainer import Trainer


class Stations(NamedTuple):
    engine: Engine
    trainer: Trainer | RankedTrainer | PacedTrainer | NoTrainer
    connect_members: Callable[[int, int, str, int, float], Members | RankedMembers | PacedMembers]
    """(rank, world, store address, membership epoch, timeout in seconds)"""
    publishable: Callable[[], dict[str, Any]]
    """The arrays of a publish."""


class NoTrainer:
    """What a standalone engine has in place of a trainer: any work for it is refused."""

    def offload(self) -> None:
        """There is nothing to give back."""

    def __getattr__(self, name: str) -> Any:
        raise TrainerError(f"a standalone engine has no trainer: {name} belongs to a cell")


class Home(NamedTuple):
    """What the process of a cell offers its stations."""

    carrier: Carrier
    place: CarrierPlace
    """Where `carrier` was opened, for the other processes of the cell."""
    threads: int
    meeting: Meeting


def build_stations(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig | None, home: Home) -> Stations:
    """Without `trainer`, a standalone engine. Raises ConfigError for a kind of engine that no cell can have."""
    match engine.engine:
        case "embedded":
            return _stations(model_dir, trainer, home, lambda: _embedded(model_dir, engine, home))
        case "vllm":
            return _stations(model_dir, trainer, home, lambda: _vllm(model_dir, engine, home))
        case "paced":
            paced = _paced(model_dir, engine, home.carrier)
            return paced if trainer is not None else _serving_only(paced.engine)
    raise ConfigError(f"a cell cannot have the engine {engine.engine!r}", key="engine.engine")


def _stations(model_dir: Path, trainer: TrainerConfig | None, home: Home, start_engine: Callable[[], Engine]) -> Stations:
    """The engine starts first: vLLM's process on a CPU is forked off this one, while nothing else has threads yet."""
    engine = start_engine()
    if trainer is None:
        return _serving_only(engine)
    made, connect = _trainer(model_dir, trainer, home)
    return Stations(engine, made, connect, made.whole_weights)


def _embedded(model_dir: Path, engine: EngineConfig, home: Home) -> Engine:
    import torch

    from qwengyre.engines.embedded import EmbeddedEngine

    torch.set_num_threads(home.threads)
    return EmbeddedEngine(model_dir, home.carrier, engine)


def _vllm(model_dir: Path, engine: EngineConfig, home: Home) -> Engine:
    import torch

    from qwengyre.engines.vllm.launch import require_vllm

    require_vllm()
    from qwengyre.engines.vllm.engine import VLLMEngine

    torch.set_num_threads(home.threads)
    return VLLMEngine(model_dir, engine, home.place)


def _trainer(
    model_dir: Path, trainer: TrainerConfig, home: Home
) -> tuple[Trainer | RankedTrainer, Callable[[int, int, str, int, float], Members | RankedMembers]]:
    """The trainer of a cell, and how it meets those of the other cells."""
    if trainer.ranks > 1:
        from qwengyre.cell.ranks.trainer import RankedTrainer

        ranked = RankedTrainer(model_dir, trainer, home)
        return ranked, ranked.connect_members
    from qwengyre.trainer.members import Members
    from qwengyre.trainer.trainer import Trainer

    return Trainer(model_dir, trainer, home.carrier), Members.connect


def _serving_only(engine: Engine) -> Stations:
    none = NoTrainer()
    return Stations(engine, none, lambda *_: none.connect_members, lambda: none.publishable)


def _paced(model_dir: Path, engine: EngineConfig, carrier: Carrier) -> Stations:
    from tokenizers import Tokenizer

    from qwengyre.paced.engine import PacedEngine
    from qwengyre.paced.plan import PacedPlan
    from qwengyre.paced.trainer import PacedMembers, PacedTrainer

    plan = PacedPlan.read(engine.paced_plan)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    made = PacedTrainer(plan, carrier)
    return Stations(PacedEngine(plan, tokenizer, carrier, engine), made, PacedMembers.connect, made.arrays_to_publish)
