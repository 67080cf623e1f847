"""Whose keys and values lie in which block: what vLLM's scheduler handed out, step by step. Pure.

vLLM's prefix cache knows whole blocks by their hash; it does not know the tokens of a last block that is not full, nor what
an aborted request had computed. The scheduler tells the worker of every block that it gives out, so the worker can know it:
a block holds what was computed into it until it is given out again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qwengyre.core.arrays import common_prefix


@dataclass(frozen=True)
class Scheduled:
    """What one request has computed when a step is over."""

    name: str
    start: int
    """Index of the first token of `token_ids`."""
    token_ids: list[int]
    blocks: list[int]
    """Blocks added since the request's last step; with `is_new` all of them."""
    is_new: bool = False
    """First step of this request, or first after it had to give its blocks back. `token_ids` then starts at 0."""
    num_shared: int = 0
    """With `is_new`: leading blocks that were found in the prefix cache and keep their content."""


@dataclass
class _Row:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """int32, computed tokens only."""
    blocks: list[int] = field(default_factory=list)
    is_live: bool = True


class BlockLedger:
    """Computed tokens of live and ended requests, as long as their blocks hold them.

    >>> ledger = BlockLedger(block_size=2)
    >>> ledger.record(Scheduled("a", 0, [7, 8, 9], [4, 5], is_new=True))
    >>> ledger.match([7, 8, 9, 10])
    ([4, 5], 3)
    >>> ledger.record(Scheduled("b", 0, [7, 8, 1], [4, 5], is_new=True, num_shared=1))
    >>> ledger.match([7, 8, 9])
    ([4], 2)
    """

    def __init__(self, block_size: int, *, max_ended: int = 1024):
        self.block_size, self.max_ended = block_size, max_ended
        self._rows: dict[str, _Row] = {}
        self._holders: dict[int, set[str]] = {}

    def record(self, step: Scheduled) -> None:
        """A request computes tokens in blocks. Blocks given out afresh lose what they held for others."""
        if step.is_new:
            self._drop(step.name)
            self._rows[step.name] = _Row()
        row = self._rows.get(step.name)
        if row is None or len(row.tokens) < step.start:
            return
        for block in step.blocks[step.num_shared :]:
            self._give_out(block)
        for block in step.blocks:
            self._holders.setdefault(block, set()).add(step.name)
        row.blocks.extend(step.blocks)
        del row.tokens[step.start :]
        row.tokens.extend(step.token_ids)

    def end(self, names: Sequence[str]) -> None:
        """These requests are over; what they computed is known until their blocks are given out again."""
        for name in names:
            if row := self._rows.pop(name, None):
                row.is_live = False
                self._rows[name] = row
        ended = [name for name, row in self._rows.items() if not row.is_live]
        for name in ended[: max(0, len(ended) - self.max_ended)]:
            self._drop(name)

    def match(self, token_ids: Sequence[int] | np.ndarray) -> tuple[list[int], int]:
        """Blocks and length of the longest computed prefix of `token_ids`."""
        wanted = np.asarray(token_ids, np.int32)
        blocks: list[int] = []
        longest = 0
        for row in self._rows.values():
            if min(len(row.tokens), len(wanted)) <= longest:
                continue
            common = common_prefix(np.frombuffer(row.tokens, np.int32), wanted)
            if common > longest:
                longest, blocks = common, row.blocks[: -(-common // self.block_size)]
        return blocks, longest

    def clear(self) -> None:
        """Nothing that was computed so far holds: other weights, or the memory is gone."""
        self._rows.clear()
        self._holders.clear()

    def _give_out(self, block: int) -> None:
        for name in self._holders.pop(block, ()):
            row = self._rows[name]
            keep = row.blocks.index(block)
            for lost in row.blocks[keep + 1 :]:
                self._holders[lost].discard(name)
            del row.blocks[keep:]
            del row.tokens[keep * self.block_size :]
            if not row.blocks and not row.is_live:
                del self._rows[name]

    def _drop(self, name: str) -> None:
        if row := self._rows.pop(name, None):
            for block in row.blocks:
                self._holders[block].discard(name)
