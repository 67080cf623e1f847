"""Chosen paths become one tree row: every distinct token once, in an order in which attention needs no copies. Pure.

`R` rows (distinct tokens), `T` tokens of one path, `P` paths.

Rows are in depth-first order, the heaviest child first, so that a **chain** (a node and its successive heaviest children)
is contiguous and the ancestors of a chain are a few contiguous runs. Attention over the row is then

* one causal square per chain, over itself, and
* one full rectangle `rows x keys` for each point of a chain at which other children branch off. The subtrees that branch
  off are contiguous too (deepest point first), so a rectangle covers all of them, with all that hangs below.

Together they hold every pair (row, ancestor) exactly once. A forest (several executions, or roots of sub-agents) is a row
with several roots: no pair crosses trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

NO_PARENT = -1
NO_ROUTE = 255
"""In place of a token's expert: none is known."""

SegmentKey = tuple[int, int, int]
"""(tree, node, first token): what two paths must have in common, in the same place, to share tokens."""


class LayoutPath(msgspec.Struct, frozen=True):
    """One root-to-leaf path: its tokens and where they come from, in order."""

    token_ids_T: np.ndarray
    segments: tuple[tuple[SegmentKey, int], ...]
    """(key, num_tokens). Equal keys in equal places share `min(num_tokens)` tokens, whatever the tokens are."""


class Chain(msgspec.Struct, frozen=True):
    """Rows [start, end), each the child of the one before; `runs` are the ancestors of `start`, root first."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...]


class Rectangle(msgspec.Struct, frozen=True):
    """Every row of [row_start, row_end) attends to every key of [key_start, key_end)."""

    row_start: int
    row_end: int
    key_start: int
    key_end: int


class Squares(msgspec.Struct, frozen=True):
    """Attention of the rows [start, end): causal squares, then full rectangles."""

    start: int
    end: int
    causal: tuple[tuple[int, int], ...]
    full: tuple[Rectangle, ...]


class TreeRow(msgspec.Struct, frozen=True):
    """Distinct tokens of some paths, laid out. Position is depth in the path, never the row."""

    token_ids_R: np.ndarray
    position_R: np.ndarray
    parent_R: np.ndarray
    """Row of the token before, NO_PARENT at a root. The target of a row's log-prob is (parent row, own token)."""
    chains: tuple[Chain, ...]
    full: tuple[Rectangle, ...]
    rows_P: tuple[np.ndarray, ...]
    """For each path, the row of each of its tokens (T,)."""
    routes_RB: np.ndarray | None = None
    """uint8: the experts of each token, as an engine has chosen them; NO_ROUTE where none did. None: of no token."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids_R)

    @property
    def num_flat(self) -> int:
        """Tokens of the flattened paths."""
        return sum(len(rows) for rows in self.rows_P)

    @property
    def num_pairs(self) -> int:
        """Attention pairs (row, ancestor or itself)."""
        return int(self.position_R.astype(np.int64).sum()) + self.num_rows


class _Node:
    """A run of tokens that no path leaves in its middle."""

    __slots__ = ("children", "end", "num_tokens", "parent", "start", "token_ids", "weight")

    def __init__(self, parent: _Node | None, token_ids: np.ndarray):
        self.parent, self.token_ids, self.num_tokens = parent, token_ids, len(token_ids)
        self.children: dict[SegmentKey, _Node] = {}
        self.weight = self.start = self.end = 0


def build_row(paths: Sequence[LayoutPath]) -> TreeRow:
    """Lay out `paths` as one row. Time is linear in distinct tokens plus segments; no token is compared.

    >>> a = LayoutPath(np.array([1, 2, 3]), (((0, 0, 0), 2), ((0, 1, 0), 1)))
    >>> b = LayoutPath(np.array([1, 2, 4, 5]), (((0, 0, 0), 2), ((0, 2, 0), 2)))
    >>> row = build_row([a, b])
    >>> row.token_ids_R.tolist(), row.parent_R.tolist(), [r.tolist() for r in row.rows_P]
    ([1, 2, 4, 5, 3], [-1, 0, 1, 2, 1], [[0, 1, 4], [0, 1, 2, 3]])
    """
    root = _Node(None, np.zeros(0, np.int32))
    for path in paths:
        _insert(root, path)
    _weigh(root)
    order, chains, full = _place(root)
    total = sum(node.num_tokens for node in order)
    token_ids_R, position_R = np.empty(total, np.int32), np.empty(total, np.int32)
    parent_R = np.arange(-1, total - 1, dtype=np.int32)
    depth_of: dict[int, int] = {id(root): 0}
    for node in order:
        depth = depth_of[id(node.parent)]
        depth_of[id(node)] = depth + node.num_tokens
        token_ids_R[node.start : node.end] = node.token_ids
        position_R[node.start : node.end] = np.arange(depth, depth + node.num_tokens)
        parent_R[node.start] = NO_PARENT if node.parent in (None, root) else node.parent.end - 1
    rows_P = tuple(_rows_of(root, path) for path in paths)
    return TreeRow(token_ids_R, position_R, parent_R, tuple(chains), tuple(full), rows_P)


def squares(row: TreeRow, start: int = 0, end: int | None = None) -> Squares:
    """The attention of rows [start, end) of `row`; keys before `start` are reached through rectangles only.

    A chain that began before `start` is a rectangle over what lies before and a smaller causal square.
    """
    end = row.num_rows if end is None else end
    causal, full = [], []
    for chain in row.chains:
        first, last = max(chain.start, start), min(chain.end, end)
        if first >= last:
            continue
        causal.append((first, last))
        if chain.start < first:
            full.append(Rectangle(first, last, chain.start, first))
    for block in row.full:
        first, last = max(block.row_start, start), min(block.row_end, end)
        if first < last:
            full.append(Rectangle(first, last, block.key_start, block.key_end))
    return Squares(start, end, tuple(causal), tuple(full))


def _insert(root: _Node, path: LayoutPath) -> None:
    node, offset = root, 0
    for (tree, source, first), num_tokens in path.segments:
        while num_tokens:
            key = (tree, source, first)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, path.token_ids_T[offset : offset + num_tokens])
            shared = min(child.num_tokens, num_tokens)
            if shared < child.num_tokens:
                _split(child, shared, (tree, source, first + shared))
            node, offset, first, num_tokens = child, offset + shared, first + shared, num_tokens - shared


def _split(node: _Node, at: int, rest_key: SegmentKey) -> None:
    rest = _Node(node, node.token_ids[at:])
    rest.children = node.children
    for child in rest.children.values():
        child.parent = rest
    node.token_ids, node.num_tokens, node.children = node.token_ids[:at], at, {rest_key: rest}


def _weigh(root: _Node) -> None:
    stack, order = [root], []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    for node in reversed(order):
        node.weight = node.num_tokens + sum(child.weight for child in node.children.values())


def _place(root: _Node) -> tuple[list[_Node], list[Chain], list[Rectangle]]:
    """Give every node its rows; return nodes in row order, chains and rectangles."""
    order: list[_Node] = []
    chains: list[Chain] = []
    full: list[Rectangle] = []
    row = 0
    heads: list[tuple[_Node, tuple[tuple[int, int], ...]]] = [
        (child, ()) for child in sorted(root.children.values(), key=lambda child: child.weight)
    ]
    while heads:
        head, runs = heads.pop()
        start, points = row, []
        node: _Node | None = head
        while node is not None:
            node.start, row = row, row + node.num_tokens
            node.end = row
            order.append(node)
            children = sorted(node.children.values(), key=lambda child: child.weight)
            branches, node = children[:-1], children[-1] if children else None
            if branches:
                heads += [(branch, (*runs, (start, row))) for branch in branches]
                points.append((row, sum(branch.weight for branch in branches)))
        chains.append(Chain(start, row, runs))
        full += _rectangles(start, row, points)
    return order, chains, full


def _rectangles(start: int, first_row: int, points: list[tuple[int, int]]) -> list[Rectangle]:
    """Cover what branches off a chain at `points` (end of the shared keys, rows below), shallowest first.

    One rectangle per point, halving the points below each time, so that long trunks with many branches are read
    about log2(points) times instead of once per branch.
    """
    rows = np.cumsum([0, *(weight for _, weight in reversed(points))])[::-1] + first_row
    found: list[Rectangle] = []
    todo = [(0, len(points), start)] if points else []
    while todo:
        low, high, key_start = todo.pop()
        key_end = points[low][0]
        found.append(Rectangle(int(rows[high]), int(rows[low]), key_start, key_end))
        middle = (low + 1 + high) // 2
        todo += [(a, b, key_end) for a, b in ((low + 1, middle), (middle, high)) if a < b]
    return found


def _rows_of(root: _Node, path: LayoutPath) -> np.ndarray:
    node, pieces = root, []
    for (tree, source, first), num_tokens in path.segments:
        while num_tokens:
            node = node.children[tree, source, first]
            pieces.append(np.arange(node.start, node.end))
            first, num_tokens = first + node.num_tokens, num_tokens - node.num_tokens
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
