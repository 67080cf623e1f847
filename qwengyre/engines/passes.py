"""What one pass over the model is asked for, and who computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(slots=True)
class Pass:
    """The next tokens of all running calls. Arrays are int64.

    N tokens: first one for each decoding call, then pieces of prompts, whole calls one after the other. Token i is written
    to `positions[i]` of row `row_of[i]`, sees positions 0..`positions[i]` of that row, and `wanted` (W,) lists the tokens
    after which a token is drawn.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    row_of: np.ndarray
    wanted: np.ndarray
    temperatures: list[float]
    """(W,)"""
    draws: list[float]
    """(W,) random numbers in [0, 1)."""
    num_decoding: int
    pieces: list[tuple[int, int, int]]
    """(row, start, length) of each piece of a prompt."""


class Forward(Protocol):
    """The model on its weights and memory."""

    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        """Tokens and log-probs (W,)."""
        ...

    def refresh(self) -> None:
        """The weights have changed."""
        ...
