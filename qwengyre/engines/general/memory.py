"""Blocks of keys and values for attention of any shape, and the states of recurrent layers by slot.

layers[i]      (blocks, block_size, Hk * d + Hk * e)     a token's keys, then its values
convolution[i] (slots, tokens before, C)
scan[i]        (slots, ...)
"""

from __future__ import annotations

import torch

from qwengyre.engines.general.shapes import Shapes
from qwengyre.engines.kv import BlockMemory, untouched
from qwengyre.transfer.api import Pieces


class GeneralMemory(BlockMemory):
    def __init__(self, shapes: Shapes, *, num_blocks: int, block_size: int):
        widths = [heads * (key + value) for heads, key, value in shapes.attention]
        super().__init__([untouched((num_blocks, block_size, width)) for width in widths], num_blocks, block_size)
        self.shapes = shapes.attention


class StateMemory:
    """States of running calls, by their slots, and snapshots of states behind them."""

    def __init__(self, shapes: Shapes, num_slots: int):
        self.convolution = [untouched((num_slots, *shape)) for shape in shapes.convolution]
        self.scan = [untouched((num_slots, *shape)) for shape in shapes.scan]
        self.num_bytes = 4 * sum(part.numel() for part in self._parts())

    def clear(self, slot: int) -> None:
        """The state of a text that has not begun."""
        for part in self._parts():
            part[slot] = 0

    def copy(self, source: int, destination: int) -> None:
        for part in self._parts():
            part[destination] = part[source]

    def regions(self, slot: int) -> dict[str, Pieces]:
        """The memory of one slot, to be exposed or read into."""
        return {f"state.{index}": part[slot].numpy() for index, part in enumerate(self._parts())}

    def _parts(self) -> list[torch.Tensor]:
        return self.convolution + self.scan
