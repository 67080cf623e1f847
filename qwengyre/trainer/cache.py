"""What attention needs to know of the row it works on: who sees whom, and the keys of rows computed in other chunks.

`R` rows of the whole row, `Hk` key heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qwengyre.trajectory.layout import Squares, TreeRow


class LayerCache:
    """Keys and values of all rows of one layer, and the gradients that later rows have sent to them. (Hk, R, d) each."""

    __slots__ = ("d_key", "d_value", "key", "value")

    def __init__(self, num_rows: int, key: Tensor, value: Tensor):
        self.key = key.new_empty(key.shape[1], num_rows, key.shape[3])
        self.value = value.new_empty(value.shape[1], num_rows, value.shape[3])
        self.d_key: Tensor | None = None
        self.d_value: Tensor | None = None

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The running dK and dV; zero at first use."""
        if self.d_key is None:
            self.d_key, self.d_value = torch.zeros_like(self.key), torch.zeros_like(self.value)
        return self.d_key, self.d_value


class RowCache:
    """`LayerCache` by layer, made at first use."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.layers: dict[int, LayerCache] = {}
        self.states: dict[tuple[str, int], object] = {}
        """What layers that are not attention hand from chunk to chunk, by kind and layer."""


class TreePlan:
    """The forward keyword `tree`: rows [squares.start, squares.end) of `row`, with a cache when the row is cut in chunks."""

    def __init__(self, row: TreeRow, squares: Squares, cache: RowCache | None = None):
        self.row, self.squares, self.cache = row, squares, cache
        self.longest = int(row.position_R.max(initial=-1)) + 1
        self.attention_calls = self.linear_calls = 0
        self.linear_layer = -1
        self.exports: list[tuple[Tensor, Callable[[], Tensor | None]]] = []
        """Tensors of this chunk that later chunks read, and what gives the gradient that came back (None: none did)."""

    def layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache | None:
        """The cache of layer `index` with this chunk's keys and values written into it; None without chunks."""
        if self.cache is None:
            return None
        layer = self.cache.layers.get(index)
        if layer is None:
            layer = self.cache.layers[index] = LayerCache(self.cache.num_rows, key, value)
        own = slice(self.squares.start, self.squares.end)
        layer.key[:, own] = key[0].detach()
        layer.value[:, own] = value[0].detach()
        return layer
