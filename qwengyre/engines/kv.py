"""Where keys and values lie: contiguous rows of running calls, and a paged prefix cache of everything else.

A running call owns a row, so that an iteration reads each of its keys and values once, in place. Gathering them from
pages would read and write them once more, twice the time of attention (docs/engines.md has the figures). Pages are
what calls leave behind: blocks of `block_size` tokens in a tree, found again by content, moved between engines.

    rows    (layers, rows, 2, kv_heads, positions, head_dim)      2: keys, values
    blocks  (blocks, layers, 2, kv_heads, block_size, head_dim)   one block is one stretch of bytes
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from qwengyre.engines.model import ModelSpec


def anonymous(*shape: int) -> torch.Tensor:
    """Float32 memory straight from the system: not resident before first use, given back when dropped."""
    memory = mmap.mmap(-1, 4 * int(np.prod(shape)))
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


class Node:
    """One block of the prefix cache: the tokens that lead here are the keys on the way from the root."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, key: bytes, parent: Node | None, block: int):
        self.key, self.parent, self.block = key, parent, block
        self.children: dict[bytes, Node] = {}


class PrefixCache:
    """Which tokens have their keys and values in which block, at the present policy version.

    A path from the root is made of full blocks; its last block may be shorter. When blocks run out, the end of the path
    that was not used for longest goes first. Holds no memory itself.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._root = Node(b"", None, -1)
        self._leaves: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def match(self, token_ids: np.ndarray) -> tuple[list[int], int]:
        """Blocks of the longest cached prefix of `token_ids` (int32), and how many tokens they hold."""
        path = list(self._walk(token_ids))
        if path and path[-1] in self._leaves:
            self._leaves.move_to_end(path[-1])
        return [node.block for node in path], sum(len(node.key) for node in path) // 4

    def insert(self, token_ids: np.ndarray) -> list[tuple[int, int]]:
        """Make room for all of `token_ids`; return (start, block) of every piece that was not there yet.

        Stops early when the cache is too small for the whole.
        """
        path = [node for node in self._walk(token_ids) if len(node.key) == 4 * self.block_size]
        node = path[-1] if path else self._root
        placed = []
        for start in range(len(path) * self.block_size, len(token_ids), self.block_size):
            key = token_ids[start : start + self.block_size].tobytes()
            if key in node.children:
                break
            block = self._take_block(node)
            if block is None:
                break
            child = Node(key, node, block)
            node.children[key] = child
            self._leaves.pop(node, None)
            self._leaves[child] = None
            placed.append((start, block))
            node = child
        return placed

    def _walk(self, token_ids: np.ndarray) -> Iterator[Node]:
        node, start, size = self._root, 0, self.block_size
        while True:
            rest = token_ids[start : start + size].tobytes()
            child = node.children.get(rest)
            if child is None:
                break
            yield child
            node, start = child, start + len(rest) // 4
        lengths = {len(key) for key in node.children if len(key) < len(rest)}
        for length in sorted(lengths, reverse=True):
            if child := node.children.get(rest[:length]):
                yield child
                return

    def _take_block(self, keep: Node) -> int | None:
        if self._free:
            return self._free.pop()
        victim = next((leaf for leaf in self._leaves if leaf is not keep), None)
        if victim is None:
            return None
        del self._leaves[victim]
        parent = victim.parent
        del parent.children[victim.key]
        if not parent.children and parent is not self._root:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
        return victim.block


class KVMemory:
    """The tensors of rows and blocks, and the copies between them."""

    def __init__(self, spec: ModelSpec, *, num_rows: int, num_positions: int, num_blocks: int, block_size: int):
        self.block_size, self.num_positions = block_size, num_positions
        self.rows = anonymous(spec.num_layers, num_rows, 2, spec.kv_heads, num_positions, spec.head_dim)
        self.blocks = anonymous(num_blocks, spec.num_layers, 2, spec.kv_heads, block_size, spec.head_dim)
        self.flat = [self.rows[layer].view(-1, spec.head_dim) for layer in range(spec.num_layers)]
        """Per layer, (rows * 2 * kv_heads * positions, head_dim): what new keys and values are written to."""
        heads = torch.arange(spec.kv_heads) * num_positions
        self.key_base = (torch.arange(num_rows) * 2 * spec.kv_heads * num_positions)[:, None] + heads
        """(rows, kv_heads): index into `flat` of the key of position 0."""
        self.value_offset = spec.kv_heads * num_positions
        self.num_bytes = 4 * (self.rows.numel() + self.blocks.numel())

    def load(self, row: int, blocks: Sequence[int], num_tokens: int) -> None:
        """Copy cached blocks to the head of a row."""
        size, whole = self.block_size, num_tokens // self.block_size
        if whole:
            index = torch.tensor(blocks[:whole])
            self._stretch(row, 0, whole).copy_(self.blocks.index_select(0, index).movedim(0, 3))
        if num_tokens % size:
            rest = num_tokens - whole * size
            self.rows[:, row, :, :, whole * size : num_tokens] = self.blocks[blocks[whole], :, :, :, :rest]

    def save(self, row: int, placed: Sequence[tuple[int, int]], num_tokens: int) -> None:
        """Copy the pieces (start, block) of a row, whose first `num_tokens` are computed, to their blocks."""
        if not placed:
            return
        size, first = self.block_size, placed[0][0] // self.block_size
        whole = [block for start, block in placed if start + size <= num_tokens]
        if whole:
            self.blocks.index_copy_(0, torch.tensor(whole), self._stretch(row, first, first + len(whole)).movedim(3, 0))
        for start, block in placed[len(whole) :]:
            self.blocks[block, :, :, :, : num_tokens - start] = self.rows[:, row, :, :, start:num_tokens]

    def _stretch(self, row: int, first: int, last: int) -> torch.Tensor:
        """Blocks `first`..`last` of a row: (layers, 2, kv_heads, blocks, block_size, head_dim)."""
        part = self.rows[:, row, :, :, first * self.block_size : last * self.block_size]
        return part.unflatten(3, (last - first, self.block_size))
