"""What the chunks of a row hand to later chunks, and the gradients that come back: keys and values, and the states of recurrent layers.

`R` rows of the whole row, `Hk` key heads, `d` and `e` widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qwengyre.models.placement import wide


class LayerCache:
    """Keys (Hk, R, d) and values (Hk, R, e) of all rows of one layer, and the gradients that later rows have sent to them."""

    __slots__ = ("d_key", "d_value", "key", "value")

    def __init__(self, num_rows: int, key: Tensor, value: Tensor):
        self.key = key.new_empty(key.shape[1], num_rows, key.shape[3])
        self.value = value.new_empty(value.shape[1], num_rows, value.shape[3])
        self.d_key: Tensor | None = None
        self.d_value: Tensor | None = None

    def write(self, rows: slice, key: Tensor, value: Tensor) -> None:
        """Keep keys and values (1, Hk, len(rows), ...) of these rows."""
        self.key[:, rows] = key[0].detach()
        self.value[:, rows] = value[0].detach()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The running dK and dV, in the dtype of sums; zero at first use."""
        if self.d_key is None or self.d_value is None:
            self.d_key, self.d_value = sums_like(self.key, self.value)
        return self.d_key, self.d_value


def sums_like(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros to add gradients of `key` and `value` to."""
    return torch.zeros_like(key, dtype=wide(key.dtype)), torch.zeros_like(value, dtype=wide(value.dtype))


Export = tuple[Tensor, Callable[[], Tensor | None]]
"""A tensor of one chunk that later chunks read, and what gives the gradient that came back (None: none did)."""


class Store:
    """Values after rows that rows of later chunks read, and the gradients that those send back."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def fetch(self, rows: list[int], anchor: Tensor) -> Tensor:
        """Values after `rows` (len(rows), ...), differentiable when `anchor` is."""
        values: Tensor = _Fetch.apply(anchor, self, rows)  # type: ignore[no-untyped-call]  # torch has no type for it
        return values

    def keep(self, rows: Sequence[int], values: Tensor) -> list[Export]:
        """Store `values` (len(rows), ...); in the backward of this chunk what later chunks sent back is their gradient."""
        self.values.update(zip(rows, values.detach(), strict=True))
        return [(values, lambda: self._sent_back(rows, values))] if values.requires_grad else []

    def _sent_back(self, rows: Sequence[int], values: Tensor) -> Tensor | None:
        found = [(i, self.gradients.pop(row)) for i, row in enumerate(rows) if row in self.gradients]
        if not found:
            return None
        gradient = torch.zeros_like(values)
        for i, sent in found:
            gradient[i] = sent
        return gradient


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, store: Store, rows: list[int]) -> Tensor:
        ctx.store, ctx.rows = store, rows
        return torch.stack([store.values[row] for row in rows]) if rows else anchor.new_empty(0, *anchor.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        for row, sent in zip(ctx.rows, grad, strict=True):
            before = ctx.store.gradients.get(row)
            ctx.store.gradients[row] = sent.clone() if before is None else before + sent
        return None, None, None


class RowCache:
    """What the chunks of one row share, by the place of the layer's call in a pass; made at first use."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.layers: dict[int, LayerCache] = {}
        self.states: dict[tuple[str, int], Store] = {}

    def layer(self, call: int, key: Tensor, value: Tensor) -> LayerCache:
        """Of the pass's attention number `call`, whose keys and values are shaped like these."""
        if call not in self.layers:
            self.layers[call] = LayerCache(self.num_rows, key, value)
        return self.layers[call]

    def store(self, kind: str, call: int) -> Store:
        return self.states.setdefault((kind, call), Store())
