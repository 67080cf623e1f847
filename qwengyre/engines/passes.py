"""What one pass over the model is asked for, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from qwengyre.engines.config import EngineConfig
    from qwengyre.engines.kv import BlockMemory
    from qwengyre.engines.model import Read
    from qwengyre.transfer.api import Pieces


@dataclass(slots=True)
class Pass:
    """The next tokens of all running calls. Arrays are int64.

    N tokens: first one for each decoding call, then pieces of prompts. Token i stands at position `positions[i]` of the
    call with slot `slots[i]`, sees positions 0..`positions[i]` of that call, and `wanted` (W,) lists the tokens after
    which a token is drawn.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    wanted: np.ndarray
    table_RB: np.ndarray
    """(slots, blocks): where the keys and values of each call lie."""
    temperatures: list[float]
    """(W,)"""
    draws: list[float]
    """(W,) random numbers in [0, 1)."""
    num_decoding: int
    pieces: list[tuple[int, int, int]]
    """(slot, start, length) of each piece of a prompt."""


class Forward(Protocol):
    """The model on its weights and memory."""

    routes: np.ndarray | None
    """uint8 (N, B): the experts that each token of the last pass went to, router by router; None: the model has none."""

    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        """Tokens and log-probs (W,)."""
        ...

    def logits(self, batch: Pass) -> torch.Tensor:
        """(W, V), instead of drawing from them."""
        ...

    def refresh(self) -> None:
        """The weights have changed."""
        ...


class Weights(Protocol):
    """The parameters of a model, in place."""

    def load_folder(self, model_dir: Path) -> None: ...

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Copy parameters in, by their names in transformers. Raises ModelRefused."""
        ...

    def load_by(self, read: Read, like: Mapping[str, np.ndarray]) -> None:
        """As `load`, of parameters of the shapes and dtypes of `like`, which `read(into)` fetches."""
        ...

    def release(self) -> None:
        """The engine gives its memory back."""
        ...


class StateSlots(Protocol):
    """States of recurrent layers, by slot."""

    num_bytes: int

    def clear(self, slot: int) -> None:
        """The state of a text that has not begun."""
        ...

    def copy(self, source: int, destination: int) -> None: ...

    def regions(self, slot: int) -> dict[str, Pieces]:
        """One slot, to be exposed: its memory on the host, or a copy of it there."""
        ...

    def landing(self, slot: int) -> dict[str, Pieces]:
        """Memory of the host to read one slot into; `landed` takes it."""
        ...

    def landed(self, slot: int, regions: Mapping[str, Pieces]) -> None: ...


class LoadedModel(NamedTuple):
    """A model with the memory that it serves with."""

    weights: Weights
    memory: BlockMemory
    forward: Forward
    states: StateSlots | None = None
    """None: no layer keeps any."""


class ServableModel(Protocol):
    """A model that an engine can serve."""

    @property
    def vocabulary(self) -> int: ...

    def fingerprint(self, block_size: int) -> str:
        """Equal for two engines exactly when one can read the KV blocks of the other."""
        ...

    def open(self, config: EngineConfig, device: torch.device) -> LoadedModel:
        """Memory on `device` to serve with. Raises ConfigError."""
        ...
