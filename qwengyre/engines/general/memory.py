"""Blocks of keys and values for attention of any shape, and the states of recurrent layers by slot.

layers[i]      (blocks, block_size, Hk * d + Hk * e)     a token's keys, then its values
convolution[i] (slots, tokens before, C)
scan[i]        (slots, ...)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from qwengyre.engines.general.shapes import Shapes
from qwengyre.engines.kv import BlockMemory, untouched
from qwengyre.models.placement import HOST, fetch, host_array, put
from qwengyre.transfer.api import Pieces
from qwengyre.transfer.layout import pieces_of


class GeneralMemory(BlockMemory):
    def __init__(self, shapes: Shapes, *, num_blocks: int, block_size: int, device: torch.device = HOST):
        widths = [heads * (key + value) for heads, key, value in shapes.attention]
        super().__init__([untouched((num_blocks, block_size, width), device) for width in widths], num_blocks, block_size)
        self.shapes = shapes.attention


class StateMemory:
    """States of running calls, by their slots, and snapshots of states after them."""

    def __init__(self, shapes: Shapes, num_slots: int, device: torch.device = HOST):
        self.device = device
        self.convolution = [untouched((num_slots, *shape), device) for shape in shapes.convolution]
        self.scan = [untouched((num_slots, *shape), device) for shape in shapes.scan]
        self.num_bytes = 4 * sum(part.numel() for part in self._parts())

    def clear(self, slot: int) -> None:
        """The state of a text that has not begun."""
        for part in self._parts():
            part[slot] = 0

    def copy(self, source: int, destination: int) -> None:
        for part in self._parts():
            part[destination] = part[source]

    def regions(self, slot: int) -> dict[str, Pieces]:
        """One slot, to be exposed: its memory on the host, or a copy of it there."""
        here = fetch([part[slot] for part in self._parts()])
        return {f"state.{index}": part for index, part in enumerate(here)}

    def landing(self, slot: int) -> dict[str, Pieces]:
        """Memory of the host to read one slot into; `landed` takes it. On the host it is the slot's own."""
        if self.device == HOST:
            return self.regions(slot)
        parts = [host_array(part.shape[1:], np.float32, self.device) for part in self._parts()]
        return {f"state.{index}": part for index, part in enumerate(parts)}

    def landed(self, slot: int, regions: Mapping[str, Pieces]) -> None:
        """What `landing` gave has been read into."""
        if self.device != HOST:
            for index, part in enumerate(self._parts()):
                part[slot] = put(pieces_of(regions[f"state.{index}"])[0], self.device)

    def _parts(self) -> list[torch.Tensor]:
        return self.convolution + self.scan
