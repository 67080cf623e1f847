"""From the calls of one execution to its radix tree: a pure function of the set of calls, whatever order they came in.

Every call is a *strand*: its own tokens (context, then sampled), attached to its base's strand after some offset. The
tree is grown from the root by *cursors* that walk the strands in step. Cursors stay in one run of tokens while they agree on
the next token and on who sampled it; where they do not, the node ends and branches.

What agrees:
* equal context tokens;
* a context token with the sampled token that the record holds at that place: the harness sent back what was sampled, so it
  is the same token in the same context, and it stays sampled (with several candidates, the longest agreement wins, and an answer
  the client never got must be sent back whole to be recognized);
* never the samples of two calls, even if equal: they are two draws, and each is trained once;
* never what was sampled after a stop string: no harness saw it, so a context that reads the same is the harness's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from qwengyre.core.arrays import common_prefix
from qwengyre.core.ids import CallId
from qwengyre.trajectory.calls import RecordedCall


class Strand:
    """The own tokens of one call and where other strands leave them. `offset` counts own tokens, 1 .. num_own."""

    __slots__ = ("attached", "call", "extended_to", "masked_from", "order", "own_ids", "sampled_from")

    def __init__(self, call: RecordedCall):
        self.call = call
        self.order = call.number
        self.own_ids = call.own_ids
        self.sampled_from = call.num_context
        self.masked_from = len(self.own_ids) - call.num_masked
        self.attached: dict[int, list[Strand]] = {}
        self.extended_to = 0
        """Own tokens up to which another call's row goes on: an unanswered call is trained that far."""

    def __len__(self) -> int:
        return len(self.own_ids)


class Cursor(NamedTuple):
    strand: Strand
    offset: int

    @property
    def is_at_sampled(self) -> bool:
        return self.offset >= self.strand.sampled_from

    @property
    def is_at_end(self) -> bool:
        return self.offset >= len(self.strand)

    def ids(self, most: int) -> np.ndarray:
        """The next tokens, at most `most`."""
        return self.strand.own_ids[self.offset : self.offset + most]

    def tokens_to_event(self) -> int:
        """Tokens until this strand ends, begins to be sampled or masked, or another strand is attached."""
        strand, offset = self.strand, self.offset
        stops = (strand.sampled_from, strand.masked_from, len(strand), *strand.attached)
        return min(at for at in stops if at > offset) - offset


class Piece(NamedTuple):
    """`num_tokens` consecutive tokens of one strand, from own offset `first` on."""

    strand: Strand
    first: int
    num_tokens: int


class NodeDraft:
    """One node under construction."""

    __slots__ = ("children", "ends", "num_tokens", "parent", "pieces")

    def __init__(self, parent: NodeDraft | None):
        self.parent = parent
        self.pieces: list[Piece] = []
        self.num_tokens = 0
        self.ends: list[tuple[int, CallId]] = []
        """(tokens of this node, call) of every row that ends in it."""
        self.children: list[NodeDraft] = []


def grow(calls: Mapping[CallId, RecordedCall]) -> tuple[list[NodeDraft], list[CallId], list[CallId]]:
    """Return all runs (parents before children, siblings unordered), calls with an empty row, and calls left out.

    Left out are calls whose base is unknown, too short so far, or left out itself.
    """
    roots, left_out = _attach(calls)
    runs: list[NodeDraft] = []
    top = NodeDraft(None)
    heads = _arrive([Cursor(strand, 0) for strand in roots], top)
    todo: list[tuple[NodeDraft | None, list[Cursor]]] = [(None, group) for group in _partition(heads)]
    while todo:
        parent, group = todo.pop()
        runs.append(run := NodeDraft(parent))
        if parent is not None:
            parent.children.append(run)
        todo += [(run, branch) for branch in _walk(run, group)]
    return runs, [call for _, call in top.ends], left_out


def _attach(calls: Mapping[CallId, RecordedCall]) -> tuple[list[Strand], list[CallId]]:
    """Hang every strand on the strand that holds its last shared token; return those of the root and the calls left out."""
    extending: dict[CallId | None, list[RecordedCall]] = {}
    for call in calls.values():
        extending.setdefault(call.base, []).append(call)
    strands: dict[CallId, Strand] = {}
    roots: list[Strand] = []
    todo = list(extending.get(None, ()))
    while todo:
        call = todo.pop()
        strand = strands[call.id] = Strand(call)
        todo += [other for other in extending.get(call.id, ()) if other.base_tokens <= call.num_tokens]
        holder = call
        while holder.base is not None and call.base_tokens <= holder.base_tokens:
            holder = calls[holder.base]
        if call.base_tokens == 0:
            roots.append(strand)
            continue
        own = call.base_tokens - holder.base_tokens
        strands[holder.id].attached.setdefault(own, []).append(strand)
        strands[holder.id].extended_to = max(strands[holder.id].extended_to, own)
    return roots, [call for call in calls if call not in strands]


def _walk(run: NodeDraft, group: list[Cursor]) -> list[list[Cursor]]:
    """Lengthen `run` as far as its cursors agree; return the groups that branch off after it."""
    while True:
        leader = min(group, key=lambda cursor: (not cursor.is_at_sampled, cursor.strand.order))
        num_tokens = _num_equal(group, leader, min(cursor.tokens_to_event() for cursor in group))
        run.pieces.append(Piece(leader.strand, leader.offset, num_tokens))
        run.num_tokens += num_tokens
        if leader.is_at_sampled and len(group) > 1:
            leader.strand.extended_to = max(leader.strand.extended_to, leader.offset + num_tokens)
        moved = [Cursor(cursor.strand, cursor.offset + num_tokens) for cursor in group]
        groups = _partition(_arrive(moved, run))
        if len(groups) != 1:
            return groups
        group = groups[0]


def _arrive(cursors: list[Cursor], run: NodeDraft) -> list[Cursor]:
    """Note the rows that end here, add the strands attached here, and return the cursors that go on."""
    going: list[Cursor] = []
    todo = list(cursors)
    while todo:
        cursor = todo.pop()
        todo += [Cursor(strand, 0) for strand in cursor.strand.attached.get(cursor.offset, ())]
        if cursor.is_at_end:
            run.ends.append((run.num_tokens, cursor.strand.call.id))
        else:
            going.append(cursor)
    return going


def _partition(cursors: list[Cursor]) -> list[list[Cursor]]:
    """Split cursors at one position into groups that agree on the next token and on who sampled it."""
    by_token: dict[int, tuple[list[Cursor], list[Cursor]]] = {}
    for cursor in cursors:
        pair = by_token.setdefault(int(cursor.strand.own_ids[cursor.offset]), ([], []))
        pair[cursor.is_at_sampled].append(cursor)
    groups: list[list[Cursor]] = []
    for context, sampled in by_token.values():
        alone: list[Cursor] = []
        sampled = sorted(sampled, key=lambda cursor: (not cursor.strand.call.is_answered, cursor.strand.order))
        joined = [[cursor] for cursor in sampled]
        for cursor in context:
            lengths = [_agreement(cursor, other) for other in sampled]
            best = max(lengths, default=0)
            (joined[lengths.index(best)] if best else alone).append(cursor)
        groups += [*joined, *([alone] if alone else [])]
    return groups


def _agreement(context: Cursor, sampled: Cursor) -> int:
    """Tokens of the sampled answer that `context` sends back; 0 if nothing proves that it does."""
    left = max(0, sampled.strand.masked_from - sampled.offset)
    length = _num_equal([context], sampled, min(left, len(context.strand) - context.offset))
    return length if sampled.strand.call.is_answered or length == left else 0


def _num_equal(cursors: list[Cursor], leader: Cursor, most: int) -> int:
    """Leading tokens, up to `most`, in which every cursor equals `leader`."""
    for cursor in cursors:
        if cursor is not leader:
            most = common_prefix(leader.ids(most), cursor.ids(most))
    return most
