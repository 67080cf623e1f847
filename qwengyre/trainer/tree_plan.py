"""The plan of a pass over a tree row: who sees whom, which state a token starts from, and what chunks hand to each other.

`n` rows of this chunk, `R` rows of the whole row, `C` channels. `models/plan.py` says what each method is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from qwengyre.core.errors import TrainerError
from qwengyre.models.plan import ScoreRule
from qwengyre.trainer.attention import attend
from qwengyre.trainer.cache import Export, LayerCache, RowCache, Store
from qwengyre.trajectory.layout import NO_ROUTE, Squares, TreeRow


class PassCounts:
    """How often a pass has asked for each of the three things: equal for every pass of one model."""

    __slots__ = ("attention", "convolution", "scan")

    def __init__(self) -> None:
        self.attention = self.convolution = self.scan = 0

    def as_tuple(self) -> tuple[int, int, int]:
        return self.attention, self.convolution, self.scan


class TreePlan:
    """Rows [squares.start, squares.end) of `row`, with a cache when the row is cut into chunks."""

    def __init__(self, row: TreeRow, squares: Squares, cache: RowCache | None = None):
        self.row, self.squares, self.cache = row, squares, cache
        self.longest = int(row.position_R.max(initial=-1)) + 1
        """Tokens of the longest path."""
        self.calls = PassCounts()
        self.exports: list[Export] = []
        self._num_chosen = 0
        """Experts of a token, of the routers that have asked."""
        self._pieces: list[tuple[int, int]] | None = None

    @property
    def own(self) -> slice:
        return slice(self.squares.start, self.squares.end)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
        self.calls.attention += 1
        return attend(query, key, value, self, scores)

    def kept(self, key: Tensor, value: Tensor) -> LayerCache | None:
        """The cache of the present attention with this chunk's keys and values in it; None without chunks."""
        if self.cache is None:
            return None
        layer = self.cache.layer(self.calls.attention, key, value)
        layer.write(self.own, key, value)
        return layer

    def reach(self, own_nC: Tensor, num_taps: int) -> tuple[Tensor, np.ndarray]:
        """The plan's rows, preceded by the few rows of earlier chunks that some tap reaches."""
        self.calls.convolution += 1
        start, end = self.squares.start, self.squares.end
        columns = [np.arange(start, end)]
        for _ in range(num_taps - 1):
            above = columns[-1]
            columns.append(np.where(above >= 0, self.row.parent_R[np.maximum(above, 0)], -1))
        above_nK = np.stack(columns, 1).astype(np.int64)
        outside = np.unique(above_nK[(above_nK >= 0) & (above_nK < start)])
        places = np.where(above_nK >= start, above_nK - start + len(outside), np.searchsorted(outside, above_nK))
        if self.cache is not None:
            store = self.cache.store("convolution", self.calls.convolution)
            fetched = store.fetch(outside.tolist(), own_nC)
            self.exports += store.keep(range(start, end), own_nC)
            own_nC = torch.cat([fetched, own_nC]) if len(outside) else own_nC
        return own_nC, np.where(above_nK >= 0, places, -1)

    def pieces(self) -> list[tuple[int, int]]:
        """The plan's rows, cut after every row that has a child which is not the next row."""
        if self._pieces is None:
            start, end, parent_R = self.squares.start, self.squares.end, self.row.parent_R
            cuts = {start, end}
            for chain in self.row.chains:
                cuts.add(chain.start)
                if parent_R[chain.start] >= 0:
                    cuts.add(int(parent_R[chain.start]) + 1)
            self._pieces = list(pairwise(sorted(cut for cut in cuts if start <= cut <= end)))
        return self._pieces

    def cuts(self) -> list[int]:
        return [end - start for start, end in self.pieces()]

    def groups(self) -> Sequence[Sequence[int]]:
        """One after the other: a piece starts from the state of one before it."""
        return [(index,) for index in range(len(self.pieces()))]

    def choose(self, chosen_nK: Tensor) -> Tensor:
        """Where the row knows a token's experts, those."""
        first = self._num_chosen
        self._num_chosen += chosen_nK.shape[1]
        if self.row.routes_RB is None:
            return chosen_nK
        width = self.row.routes_RB.shape[1]
        if self._num_chosen > width:
            raise TrainerError(
                f"the routes of this row have {width} bytes a token, this model has more: they are of another model"
            )
        routes_nK = torch.from_numpy(self.row.routes_RB[self.own, first : self._num_chosen].astype(np.int64)).to(chosen_nK.device)
        return torch.where((routes_nK == NO_ROUTE).any(1, keepdim=True), chosen_nK, routes_nK)

    def next_scan(self) -> TreeStates:
        self.calls.scan += 1
        return TreeStates(self, self.cache.store("scan", self.calls.scan) if self.cache is not None else None)


class TreeStates:
    """States of one scan over a tree: a piece starts from the state after its parent row."""

    def __init__(self, tree: TreePlan, store: Store | None):
        self._tree, self._store = tree, store
        self._after: dict[int, Tensor] = {}
        """By row: the state after it, (1, ...)."""

    def before(self, group: Sequence[int], given: Tensor) -> Tensor | None:
        parent = int(self._tree.row.parent_R[self._tree.pieces()[group[0]][0]])
        if 0 <= parent < self._tree.squares.start and parent not in self._after:
            assert self._store is not None, "rows before this chunk are those of a row in chunks"
            self._after[parent] = self._store.fetch([parent], given)
        return self._after.get(parent)

    def after(self, group: Sequence[int], states: Tensor) -> None:
        last = self._tree.pieces()[group[0]][1] - 1
        self._after[last] = states
        if self._store is not None:
            self._tree.exports += self._store.keep([last], states)
