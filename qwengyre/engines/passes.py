"""What one pass over the model is asked for, and what computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


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

    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        """Tokens and log-probs (W,)."""
        ...

    def refresh(self) -> None:
        """The weights have changed."""
        ...
