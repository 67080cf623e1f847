"""The prefix cache of a model with recurrent layers: a prefix is known where the state after it was kept.

States are large, so they are kept at the ends of blocks at which a pass stopped, and where a call ended; the one that was not used
for longest goes first. Keys and values beyond a kept state help nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from qwengyre.engines.kv import Node, PrefixCache
from qwengyre.engines.passes import StateSlots


class StateCache(PrefixCache):
    def __init__(self, num_blocks: int, block_size: int, states: StateSlots, snapshots: Sequence[int]):
        """`snapshots`: slots of `states` that are for the cache to give out."""
        super().__init__(num_blocks, block_size)
        self.states = states
        self._free_snapshots = list(snapshots)
        self._snapshots: OrderedDict[Node, int] = OrderedDict()
        """The slot of the state after each node that has one, that not used for longest first."""

    def match(self, token_ids: np.ndarray) -> tuple[list[int], int]:
        """Blocks of the longest prefix of `token_ids` whose state is kept, and how many tokens it has."""
        nodes = self._known(token_ids)
        if nodes:
            self._snapshots.move_to_end(nodes[-1])
            if nodes[-1] in self._leaves:
                self._leaves.move_to_end(nodes[-1])
        return [node.block for node in nodes], sum(len(node.key) for node in nodes) // token_ids.itemsize

    def snapshot(self, token_ids: np.ndarray) -> int:
        """The slot of the state after `token_ids`, which `match` has found."""
        return self._snapshots[self._known(token_ids)[-1]]

    def take_snapshot(self) -> int:
        """A slot to put a state into; the state that was not used for longest makes room."""
        if not self._free_snapshots:
            self._free_snapshots.append(self._snapshots.popitem(last=False)[1])
        return self._free_snapshots.pop()

    def give_snapshot_back(self, slot: int) -> None:
        self._free_snapshots.append(slot)

    def keep(self, token_ids: np.ndarray, blocks: list[int], slot: int) -> None:
        """As `adopt`, with the state after these tokens in `slot`, which the cache takes back when the state is known already."""
        node = self.adopt(token_ids, blocks)
        if node in self._snapshots:
            self._snapshots.move_to_end(node)
            self.give_snapshot_back(slot)
        else:
            self._snapshots[node] = slot

    def _known(self, token_ids: np.ndarray) -> list[Node]:
        """The nodes on the way to the last kept state. A block that is not full may hold it, beside one that goes on."""
        node: Node | None = self._root
        start = 0
        way: list[Node] = []
        best: list[Node] = []
        while node is not None:
            rest = token_ids[start : start + self.block_size].tobytes()
            ends = [child for key, child in node.children.items() if child in self._snapshots and rest.startswith(key)]
            if ends:
                best = [*way, max(ends, key=lambda end: len(end.key))]
            node = node.children.get(rest)
            if node is None or len(rest) < self.block_size * token_ids.itemsize:
                break
            way.append(node)
            start += self.block_size
        return best

    def _forget(self, node: Node) -> None:
        super()._forget(node)
        if (slot := self._snapshots.pop(node, None)) is not None:
            self.give_snapshot_back(slot)
