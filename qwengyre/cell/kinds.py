"""Which engine and which trainer a cell has. Each kind is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from qwengyre.cell.home import Home
from qwengyre.core.errors import ConfigError
from qwengyre.engines.api import CellEngine, Serving
from qwengyre.engines.config import EngineConfig
from qwengyre.models.adapter_record import Base
from qwengyre.paced.plan import PacedPlan
from qwengyre.trainer.api import CellTrainer
from qwengyre.trainer.config import TrainerConfig


class CellParts(NamedTuple):
    engine: Serving
    """A CellEngine, unless the weights are elsewhere."""
    trainer: CellTrainer | None
    """None in a standalone engine."""


def build_parts(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig | None, home: Home) -> CellParts:
    """Without `trainer`, a standalone engine. Raises ConfigError for a kind of engine that no cell can have.

    The engine starts first: vLLM's process on a CPU is forked off this one, while nothing else has threads yet.
    """
    base = Base(model_dir)
    kinds: dict[str, tuple[Callable[..., Serving], Callable[..., CellTrainer]]] = {
        "embedded": (partial(_embedded, base=base), partial(_trainer, base=base)),
        "vllm": (_vllm, _trainer),
        "paced": (_paced_engine, _paced_trainer),
        "served": (_served, _no_trainer),
    }
    if engine.engine not in kinds:
        raise ConfigError(f"a cell cannot have the engine {engine.engine!r}", key="engine.engine")
    start_engine, start_trainer = kinds[engine.engine]
    started = start_engine(model_dir, engine, home)
    return CellParts(started, None if trainer is None else start_trainer(model_dir, engine, trainer, home))


def _embedded(model_dir: Path, engine: EngineConfig, home: Home, base: Base) -> CellEngine:
    import torch

    from qwengyre.engines.embedded import EmbeddedEngine

    torch.set_num_threads(home.threads)
    return EmbeddedEngine(model_dir, home.transport, engine, base=base)


def _vllm(model_dir: Path, engine: EngineConfig, home: Home) -> CellEngine:
    import torch

    from qwengyre.engines.vllm.launch import require_vllm

    require_vllm()
    from qwengyre.engines.vllm.engine import VLLMEngine

    torch.set_num_threads(home.threads)
    return VLLMEngine(model_dir, engine, home.place)


def _paced_engine(model_dir: Path, engine: EngineConfig, home: Home) -> CellEngine:
    from tokenizers import Tokenizer

    from qwengyre.paced.engine import PacedEngine

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return PacedEngine(PacedPlan.read(engine.paced_plan), tokenizer, home.transport, engine)


def _served(model_dir: Path, engine: EngineConfig, home: Home) -> Serving:
    from qwengyre.engines.completions import CompletionsEngine, open_http

    return CompletionsEngine(open_http(engine.url), engine.served_as, max_context_tokens=engine.max_context_tokens)


def _no_trainer(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig, home: Home) -> CellTrainer:
    raise ConfigError("a served model is evaluated, never trained: its weights are elsewhere", key="engine.engine")


def _trainer(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig, home: Home, base: Base | None = None) -> CellTrainer:
    if trainer.ranks > 1:
        from qwengyre.cell.ranks.trainer import RankedTrainer

        return RankedTrainer(model_dir, trainer, home)
    from qwengyre.hooks.token_loss import load_token_loss
    from qwengyre.trainer.member import MemberTrainer
    from qwengyre.trainer.trainer import Trainer

    objective = load_token_loss(home.token_loss)
    made = Trainer(model_dir, trainer, home.transport, base=base)
    made.objective = objective
    return MemberTrainer(made, home.secret)


def _paced_trainer(model_dir: Path, engine: EngineConfig, trainer: TrainerConfig, home: Home) -> CellTrainer:
    from qwengyre.paced.trainer import PacedTrainer

    return PacedTrainer(PacedPlan.read(engine.paced_plan), home.transport)
