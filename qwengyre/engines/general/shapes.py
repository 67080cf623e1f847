"""What a model keeps of each token and of each text: found by running it once on a few tokens.

`N` tokens, `C` channels, `Hq` and `Hk` query and key heads, `d` and `e` widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwengyre.models.plan import ScoreRule, following

NUM_TOKENS = 2


class Shapes(msgspec.Struct, frozen=True):
    """In the order in which a pass asks."""

    attention: tuple[tuple[int, int, int], ...]
    """(Hk, d, e) of each attention."""
    convolution: tuple[tuple[int, int], ...]
    """(tokens before, C) of each convolution."""
    scan: tuple[tuple[int, ...], ...]
    """The state of each scan."""

    @property
    def has_states(self) -> bool:
        return bool(self.convolution or self.scan)


@torch.inference_mode()
def shapes_of(body: Any) -> Shapes:
    """Of a model without its head, whatever its weights are."""
    recorder = _Recorder()
    positions = torch.arange(NUM_TOKENS, device="cpu")[None]
    with following(recorder):
        body(input_ids=torch.zeros_like(positions), position_ids=positions, attention_mask=positions >= 0, use_cache=False)
    return Shapes(tuple(recorder.attention), tuple(recorder.convolution), tuple(recorder.scan))


class _Recorder:
    """A plan of one text from its start, which notes what it is asked."""

    def __init__(self) -> None:
        self.attention: list[tuple[int, int, int]] = []
        self.convolution: list[tuple[int, int]] = []
        self.scan: list[tuple[int, ...]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
        self.attention.append((key.shape[1], key.shape[3], value.shape[3]))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    def reach(self, own_nC: Tensor, num_taps: int) -> tuple[Tensor, np.ndarray]:
        self.convolution.append((num_taps - 1, own_nC.shape[1]))
        return own_nC, np.maximum(np.arange(len(own_nC))[:, None] - np.arange(num_taps), -1)

    def cuts(self) -> list[int]:
        return [NUM_TOKENS]

    def groups(self) -> Sequence[Sequence[int]]:
        return [(0,)]

    def next_scan(self) -> _Recorder:
        return self

    def choose(self, chosen_nK: Tensor) -> Tensor:
        return chosen_nK

    def before(self, group: Sequence[int], given: Tensor) -> None:
        return None

    def after(self, group: Sequence[int], states: Tensor) -> None:
        self.scan.append(tuple(states.shape[1:]))
