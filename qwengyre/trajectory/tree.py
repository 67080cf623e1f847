"""The compact token tree of one execution. Legend: `T` tokens of one node or path.

A node is a maximal run of tokens that no sequence leaves; it splits where sequences diverge. Every token knows where it comes from: a span
names the call that brought it, whether that call sampled it, and whether it may be trained. A sampled token stands in the tree
once, however many sequences pass through it; what a harness invented is context and never trainable.

Nodes are numbered depth first, siblings by content, so the tree does not depend on how concurrent calls interleaved.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec
import numpy as np

from qwengyre.core.arrays import LOGPROB, TOKEN, VERSION
from qwengyre.core.errors import CallOutOfOrder, InvariantViolated
from qwengyre.core.ids import CallId
from qwengyre.core.records import CONTEXT_VERSION, PathSegment
from qwengyre.trajectory.calls import CallLog, RecordedCall
from qwengyre.trajectory.layout import NO_ROUTE
from qwengyre.trajectory.radix import NodeDraft, grow
from qwengyre.trajectory.records import BranchCause, CallRecord, Opened


class Span(msgspec.Struct, frozen=True):
    """Consecutive tokens of a node with one origin: `start` to `stop`, counted from the node's first token."""

    start: int
    stop: int
    call: CallId
    """The call that brought these tokens first."""
    first_sampled: int
    """Index of the first of them among the call's sampled tokens; -1 for context."""
    trainable: bool
    """Sampled at a temperature above 0, before any stop string, and the client got the answer or went on from it."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_sampled(self) -> bool:
        return self.first_sampled >= 0


class TreeNode(msgspec.Struct, frozen=True):
    node: int
    parent: int
    """-1 for a node that hangs from the root."""
    depth: int
    """Tokens before this node on its path."""
    key: str
    """Identity by content: tokens and provenance from the root on, 16 hex digits. Equal trees have equal keys."""
    cause: BranchCause
    """Of the call that brought its first token."""
    token_ids: np.ndarray
    """int32 (T,)"""
    spans: tuple[Span, ...]
    children: tuple[int, ...]
    ends: tuple[tuple[int, CallId], ...]
    """(tokens of this node, call) of every sequence that ends in it."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trainable(self) -> int:
        return sum(span.num_tokens for span in self.spans if span.trainable)


class TrajectoryTree:
    """All contexts of one attempt. `log` is not added to any more; nodes are derived when they are first asked for."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self.calls: dict[CallId, RecordedCall] = {call.id: call for call in log}
        """In the order in which they reached the gateway."""
        self._nodes: tuple[TreeNode, ...] | None = None
        self._ends: dict[CallId, tuple[int, int]] | None = None
        self._behavior: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._routes: dict[int, np.ndarray] | None = None
        self._empty: list[CallId] = []
        self._left_out: list[CallId] = []

    @classmethod
    def build(cls, opened: Opened, records: Iterable[CallRecord]) -> TrajectoryTree:
        """From the records of one attempt, in any interleaving of its calls. Raises RecordError when a call contradicts itself."""
        return cls(CallLog.of(opened, records))

    @property
    def temperature(self) -> float:
        """At which the tokens to train were sampled; 1.0 when none is trained."""
        return self._log.opened.temperature if self._log.is_trainable else 1.0

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """All nodes, parents before children: `nodes[i].node == i`."""
        if self._nodes is None:
            drafts, self._empty, self._left_out = grow(self.calls)
            self._nodes = _number(drafts, is_trainable=self._log.is_trainable)
        return self._nodes

    @property
    def num_distinct_tokens(self) -> int:
        return sum(node.num_tokens for node in self.nodes)

    @property
    def roots(self) -> tuple[int, ...]:
        return tuple(node.node for node in self.nodes if node.parent < 0)

    def segments_to(self, node: int, num_tokens: int) -> tuple[PathSegment, ...]:
        """The path from the root to the `num_tokens`-th token of `node`."""
        segments = [PathSegment(node, num_tokens)]
        while (node := self.nodes[node].parent) >= 0:
            segments.append(PathSegment(node, self.nodes[node].num_tokens))
        return tuple(reversed(segments))

    def path_of(self, call: CallId) -> tuple[PathSegment, ...]:
        """The whole sequence of `call`, prompt and answer; empty if it has no tokens. Raises KeyError for an unknown call."""
        nodes = self.nodes
        if self._ends is None:
            self._ends = {call: (node.node, num_tokens) for node in nodes for num_tokens, call in node.ends}
        if call in self._empty:
            return ()
        return self.segments_to(*self._ends[call])

    def token_ids_T(self, segments: Iterable[PathSegment]) -> np.ndarray:
        """int32 tokens of a path."""
        return np.concatenate([np.empty(0, TOKEN), *(self.nodes[part.node].token_ids[: part.num_tokens] for part in segments)])

    def behavior_T(self, segments: tuple[PathSegment, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(float32 recorded log-prob, int32 policy version) of a path's tokens: 0 and CONTEXT_VERSION where not sampled."""
        parts = [(self._behavior_of(part.node), part.num_tokens) for part in segments]
        logprob_T = np.concatenate([np.empty(0, LOGPROB), *(logprob[:stop] for (logprob, _), stop in parts)])
        return logprob_T, np.concatenate([np.empty(0, VERSION), *(version[:stop] for (_, version), stop in parts)])

    def routes_T(self, segments: tuple[PathSegment, ...]) -> bytes:
        """uint8 (T, B): the experts of a path's tokens, as the first call that computed one was told; NO_ROUTE where none was.

        Empty when no call of this attempt was told any.
        """
        if self._routes is None:
            self._routes = self._lay_routes()
        return b"".join(self._routes[part.node][: part.num_tokens].tobytes() for part in segments) if self._routes else b""

    def _lay_routes(self) -> dict[int, np.ndarray]:
        """By node. A call's tokens lie along its path, whoever brought them first."""
        nodes, told = self.nodes, [call for call in self.calls.values() if call.routed and call.id not in self._left_out]
        widths = {len(run.routes) // run.num_tokens for call in told for run in call.routed}
        if len(widths) > 1:
            raise InvariantViolated("the calls of an attempt are of one model", f"routes of {sorted(widths)} bytes a token")
        laid = {node.node: np.full((node.num_tokens, width), NO_ROUTE, np.uint8) for width in widths for node in nodes}
        for call in told:
            for run in call.routed:
                routes_TB = np.frombuffer(run.routes, np.uint8).reshape(run.num_tokens, -1)
                for part in self.path_of(call.id):
                    first = max(nodes[part.node].depth, run.start)
                    last = min(nodes[part.node].depth + part.num_tokens, run.start + run.num_tokens)
                    if first < last:
                        own_TB = laid[part.node][first - nodes[part.node].depth : last - nodes[part.node].depth]
                        unknown_T = own_TB[:, 0] == NO_ROUTE
                        own_TB[unknown_T] = routes_TB[first - run.start : last - run.start][unknown_T]
        return laid

    def _behavior_of(self, node: int) -> tuple[np.ndarray, np.ndarray]:
        if node not in self._behavior:
            self._behavior[node] = _node_behavior(self.nodes[node], self.calls)
        return self._behavior[node]

    def validate(self, *, final: bool = True) -> None:
        """Check the rules atop this file. `final` also demands that no call waits for its base.

        Raises CallOutOfOrder for records that do not join, InvariantViolated for a bug of ours.
        """
        nodes = self.nodes
        if final and self._left_out:
            raise CallOutOfOrder(self._left_out[0], "its base or the tokens it shares with its base were never recorded")
        sampled: dict[CallId, list[tuple[int, int]]] = {}
        for node in nodes:
            _validate_node(node, nodes)
            for span in node.spans:
                if span.is_sampled:
                    sampled.setdefault(span.call, []).append((span.first_sampled, span.num_tokens))
        for call in self.calls.values():
            if call.id in self._left_out:
                continue
            stop = 0
            for first, num_tokens in sorted(sampled.get(call.id, [])):
                if first != stop:
                    raise InvariantViolated("every sampled token stands once", f"{call.id}: token {stop} at {first}")
                stop += num_tokens
            if stop != call.num_sampled:
                raise InvariantViolated("every sampled token stands once", f"{call.id}: {stop} of {call.num_sampled} tokens")


def _node_behavior(node: TreeNode, calls: dict[CallId, RecordedCall]) -> tuple[np.ndarray, np.ndarray]:
    """(float32 log-prob, int32 version) of a node's tokens."""
    logprob_T, version_T = np.zeros(node.num_tokens, LOGPROB), np.full(node.num_tokens, CONTEXT_VERSION, VERSION)
    for span in node.spans:
        if span.is_sampled:
            here, source = slice(span.start, span.stop), slice(span.first_sampled, span.first_sampled + span.num_tokens)
            logprob_T[here], version_T[here] = calls[span.call].logprob_S[source], calls[span.call].version_S[source]
    return logprob_T, version_T


def _validate_node(node: TreeNode, nodes: tuple[TreeNode, ...]) -> None:
    stop = 0
    for span in node.spans:
        if span.start != stop or span.stop <= span.start or (span.trainable and not span.is_sampled):
            raise InvariantViolated("spans cover a node", f"node {node.node}: {span}")
        stop = span.stop
    if stop != node.num_tokens or not stop:
        raise InvariantViolated("spans cover a node", f"node {node.node} has {node.num_tokens} tokens, spans {stop}")
    if len(node.children) == 1 or (not node.children and (stop, "") > max(node.ends, default=(0, ""))):
        raise InvariantViolated("a node is a maximal run", f"node {node.node} has {len(node.children)} children")
    for child in node.children:
        if nodes[child].parent != node.node or nodes[child].depth != node.depth + node.num_tokens:
            raise InvariantViolated("children begin where their parent ends", f"node {child}")


def _spans(run: NodeDraft, is_trainable: bool) -> list[Span]:
    """Join pieces of one origin, cut where an unanswered call stops being extended."""
    spans: list[Span] = []
    start = 0
    for strand, first, num_tokens in run.pieces:
        call, is_sampled = strand.call, first >= strand.sampled_from
        is_seen = is_sampled and first + num_tokens <= strand.masked_from
        may_train = is_seen and is_trainable
        trainable = may_train and (call.is_answered or first + num_tokens <= strand.extended_to)
        first_sampled = first - strand.sampled_from if is_sampled else -1
        last = spans[-1] if spans else None
        if last and (last.call, last.trainable, last.is_sampled) == (call.id, trainable, is_sampled):
            spans[-1] = msgspec.structs.replace(last, stop=last.stop + num_tokens)
        else:
            spans.append(Span(start, start + num_tokens, call.id, first_sampled, trainable))
        start += num_tokens
    return spans


def _digests(runs: list[NodeDraft], spans: dict[int, list[Span]], token_ids: dict[int, np.ndarray]) -> dict[int, bytes]:
    """Digest of every run's whole subtree, children first (`runs` has parents first)."""
    digests: dict[int, bytes] = {}
    for run in reversed(runs):
        digest = blake2b(token_ids[id(run)].tobytes(), digest_size=16)
        for piece in run.pieces:
            call, first = piece.strand.call, piece.first - piece.strand.sampled_from
            if first >= 0:
                digest.update(call.logprob_S[first : first + piece.num_tokens].tobytes())
                digest.update(call.version_S[first : first + piece.num_tokens].tobytes())
        digest.update(repr([(span.start, span.is_sampled, span.trainable) for span in spans[id(run)]]).encode())
        digest.update(b"".join(sorted(digests[id(child)] for child in run.children)))
        digests[id(run)] = digest.digest()
    return digests


def _number(runs: list[NodeDraft], *, is_trainable: bool) -> tuple[TreeNode, ...]:
    """Number runs depth first, siblings by content; without recursion, since chains of calls may be long."""
    spans = {id(run): _spans(run, is_trainable) for run in runs}
    token_ids = {id(run): _token_ids(run) for run in runs}
    digests = _digests(runs, spans, token_ids)

    def content(run: NodeDraft) -> tuple[bytes, bytes, int]:
        first = token_ids[id(run)][:64].astype(">i4").tobytes()
        return first, digests[id(run)], min(piece.strand.order for piece in run.pieces)

    todo = sorted((run for run in runs if run.parent is None), key=content, reverse=True)
    order: list[NodeDraft] = []
    while todo:
        order.append(run := todo.pop())
        todo += sorted(run.children, key=content, reverse=True)
    number = {id(run): node for node, run in enumerate(order)}
    nodes: list[TreeNode] = []
    for node, run in enumerate(order):
        parent = nodes[number[id(run.parent)]] if run.parent is not None else None
        provenance = repr([(span.start, span.is_sampled) for span in spans[id(run)]])
        above = parent.key if parent else ""
        key = blake2b(above.encode() + token_ids[id(run)].tobytes() + provenance.encode(), digest_size=8).hexdigest()
        nodes.append(
            TreeNode(
                node=node,
                parent=parent.node if parent else -1,
                depth=parent.depth + parent.num_tokens if parent else 0,
                key=key,
                cause=run.pieces[0].strand.call.started.cause,
                token_ids=token_ids[id(run)],
                spans=tuple(spans[id(run)]),
                children=tuple(sorted(number[id(child)] for child in run.children)),
                ends=tuple(sorted(run.ends)),
            )
        )
    return tuple(nodes)


def _token_ids(run: NodeDraft) -> np.ndarray:
    parts = [piece.strand.own_ids[piece.first : piece.first + piece.num_tokens] for piece in run.pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
