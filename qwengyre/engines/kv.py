"""Paged keys and values: blocks of `block_size` tokens, shared by every call with the same prefix.

`BlockMemory` is the bytes. `PrefixCache` knows which tokens lie in which block, who uses a block, and which to give up.

    blocks (layers, blocks, 2, kv_heads, block_size, head_dim)     2: keys, values
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from qwengyre.core.arrays import common_prefix
from qwengyre.engines.model import ModelSpec
from qwengyre.models.placement import HOST, fetch, host_array, put
from qwengyre.transfer.api import Pieces
from qwengyre.transfer.layout import pieces_of

EVICT_AT_ONCE = 16
"""Blocks given up together in a large cache, so that those handed out next lie side by side."""


def untouched(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """float32 memory. The host's is not resident before first use, and given back to the system when dropped."""
    size = int(np.prod(shape))
    if device != HOST:
        return torch.zeros(*shape, device=device)
    if not size:
        return torch.empty(*shape, device=HOST)
    memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(*shape)


class BlockMemory:
    """The bytes of all blocks, layer by layer: `layers[i]` is (blocks, ...)."""

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int, block_size: int):
        self.layers, self.num_blocks, self.block_size = list(layers), num_blocks, block_size
        self.num_bytes = 4 * sum(layer.numel() for layer in self.layers)
        self.device = self.layers[0].device if self.layers else HOST

    def regions(self, blocks: Sequence[int]) -> dict[str, Pieces]:
        """These blocks, to be exposed, a region for each layer: on the host their memory, a piece for each run of blocks, else a copy."""
        if self.device == HOST:
            return self.landing(blocks)
        at = put(np.asarray(blocks, np.int64), self.device)
        copies = fetch([layer.index_select(0, at) for layer in self.layers])
        return {f"kv.{index}": [copied] for index, copied in enumerate(copies)}

    def landing(self, blocks: Sequence[int], num_more: int = 0) -> dict[str, Pieces]:
        """Memory of the host to read these blocks into, laid out as `regions`; `landed` takes it. On the host it is the blocks' own.

        `num_more` blocks of scratch memory follow: a region is read whole, though not all of it is wanted.
        """
        if self.device != HOST:
            num = len(blocks) + num_more
            shapes = [(num, *layer.shape[1:]) for layer in self.layers]
            return {f"kv.{index}": [host_array(shape, np.float32, self.device)] for index, shape in enumerate(shapes)}
        parts = runs(blocks)
        found: dict[str, Pieces] = {}
        for index, layer in enumerate(self.layers):
            content = layer.numpy()
            more = [np.empty((num_more, *content.shape[1:]), np.float32)] if num_more else []
            found[f"kv.{index}"] = [*(content[first:last] for first, last in parts), *more]
        return found

    def landed(self, blocks: Sequence[int], regions: Mapping[str, Pieces]) -> None:
        """What `landing` gave has been read into."""
        if self.device == HOST:
            return
        at = put(np.asarray(blocks, np.int64), self.device)
        for index, layer in enumerate(self.layers):
            layer.index_copy_(0, at, put(pieces_of(regions[f"kv.{index}"])[0][: len(blocks)], self.device))

    def copy_block(self, source: int, destination: int) -> None:
        for layer in self.layers:
            layer[destination] = layer[source]


class KVMemory(BlockMemory):
    """Of a Qwen3 model: all layers in one array."""

    def __init__(self, spec: ModelSpec, *, num_blocks: int, block_size: int, device: torch.device = HOST):
        self.blocks = untouched((spec.num_layers, num_blocks, 2, spec.kv_heads, block_size, spec.head_dim), device)
        super().__init__(list(self.blocks), num_blocks, block_size)

    def copy_block(self, source: int, destination: int) -> None:
        self.blocks[:, destination] = self.blocks[:, source]


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Blocks that lie side by side, as (first, one after the last), in their order.

    >>> runs([3, 4, 5, 9, 8])
    [(3, 6), (9, 10), (8, 9)]
    """
    array = np.asarray(blocks)
    starts = np.flatnonzero(np.diff(array, prepend=array[0] - 2) != 1)
    lengths = np.diff(starts, append=len(array))
    return [(first, first + length) for first, length in zip(array[starts].tolist(), lengths.tolist(), strict=True)]


class Node:
    """One block in the tree of known prefixes: the tokens that lead to it are the keys on the way from the root."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, key: bytes, parent: Node | None, block: int):
        self.key, self.parent, self.block = key, parent, block
        self.children: dict[bytes, Node] = {}


def _num_common(some: bytes, others: bytes) -> int:
    """Leading tokens (int32) that two keys share.

    >>> _num_common(np.array([1, 2, 3], np.int32).tobytes(), np.array([1, 2, 4, 5], np.int32).tobytes())
    2
    """
    return common_prefix(np.frombuffer(some, np.int32), np.frombuffer(others, np.int32))


class PrefixCache:
    """Which tokens have their keys and values in which block, at the present policy version.

    A path from the root is made of full blocks; its last block may be shorter. A block is free when neither the tree nor
    a call uses it. When none is free, the end of the path that was not used for longest, and that no call uses, goes.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size, self.num_blocks = block_size, num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evict_at_once = max(1, min(EVICT_AT_ONCE, num_blocks // 16))
        self._users = [0] * num_blocks
        self._root = Node(b"", None, -1)
        self._leaves: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def clear(self) -> None:
        """Forget every prefix: the weights have changed. Blocks of calls stay theirs."""
        nodes = list(self._root.children.values())
        for node in nodes:
            nodes += node.children.values()
            self._forget(node)
        self._root.children.clear()
        self._leaves.clear()

    def match(self, token_ids: np.ndarray) -> tuple[list[int], int]:
        """Blocks of the longest cached prefix of `token_ids` (int32), and how many of these tokens they hold.

        The last block may hold more tokens, of whoever goes on otherwise: a token's keys and values depend on none after it.
        """
        path = list(self._walk(token_ids))
        if path and path[-1][0] in self._leaves:
            self._leaves.move_to_end(path[-1][0])
        return [node.block for node, _ in path], sum(num_tokens for _, num_tokens in path)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more user of each block."""
        for block in blocks:
            self._users[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One user less; blocks without any are free."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)

    def take(self) -> int | None:
        """A block with its one user, the caller; None when all blocks are in use by calls.

        Free ones are handed out in ascending order, and several are made free at once, so that a prefix lies in runs.
        """
        if not self._free and not self._make_free(self._evict_at_once):
            return None
        block = self._free.pop()
        self._users[block] = 1
        return block

    def take_many(self, num_blocks: int) -> list[int]:
        """Up to `num_blocks` blocks in ascending order, mostly side by side; each with its one user, the caller."""
        self._make_free(num_blocks)
        blocks = self._free[-num_blocks:][::-1]
        del self._free[-num_blocks:]
        self.hold(blocks)
        return blocks

    def adopt(self, token_ids: np.ndarray, blocks: list[int]) -> Node:
        """Make the prefix `token_ids`, whose keys and values lie in `blocks`, known; return where it ends.

        Where the tree knows a piece already, `blocks` is changed to the tree's block: calls that computed the same twice
        share it from now on.
        """
        node = self._root
        for index, start in enumerate(range(0, len(token_ids), self.block_size)):
            key = token_ids[start : start + self.block_size].tobytes()
            child = node.children.get(key)
            if child is None:
                child = Node(key, node, blocks[index])
                self.hold([child.block])
                node.children[key] = child
                self._leaves.pop(node, None)
                self._leaves[child] = None
            elif child.block != blocks[index] and len(key) == 4 * self.block_size:
                self.hold([child.block])
                self.drop([blocks[index]])
                blocks[index] = child.block
            node = child
        return node

    def _walk(self, token_ids: np.ndarray) -> Iterator[tuple[Node, int]]:
        """The nodes on the way, and how many tokens of each are those of `token_ids`: of all but the last, all."""
        node, start, size = self._root, 0, self.block_size
        while True:
            rest = token_ids[start : start + size].tobytes()
            child = node.children.get(rest)
            if child is None:
                break
            yield child, len(rest) // 4
            node, start = child, start + len(rest) // 4
        alike = [(_num_common(rest, key), child) for key, child in node.children.items() if key[:4] == rest[:4]]
        if alike:
            common, child = max(alike, key=lambda found: found[0])
            yield child, common

    def _make_free(self, num_blocks: int) -> bool:
        """Give up prefixes until this many blocks are free, or as many as can be; False when none is."""
        while len(self._free) < num_blocks and self._evict():
            pass
        self._free.sort(reverse=True)
        return bool(self._free)

    def _evict(self) -> bool:
        victim = next((leaf for leaf in self._leaves if self._users[leaf.block] == 1), None)
        if victim is None:
            return False
        del self._leaves[victim]
        parent = victim.parent
        assert parent is not None
        del parent.children[victim.key]
        if not parent.children and parent is not self._root:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
        self._forget(victim)
        return True

    def _forget(self, node: Node) -> None:
        """This node is no longer in the tree."""
        self.drop([node.block])
