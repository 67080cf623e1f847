"""One execution's tree as rows of a table, depth first: what the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from qwengyre.core.ids import CallId
from qwengyre.core.records import Role
from qwengyre.trajectory.paths import is_target
from qwengyre.trajectory.tree import Span, TrajectoryTree, TreeNode

Decode = Callable[[list[int]], str]


class SpanRow(msgspec.Struct, frozen=True):
    """One stretch of tokens of one origin."""

    start: int
    """Position on the path of its first token."""
    num_tokens: int
    origin: str
    """`context`, `trained` or `masked`: sampled, but of a side call, at T = 0, or never received."""
    call: CallId
    role: Role
    versions: tuple[int, ...]
    servers: tuple[str, ...]
    mean_logprob: float | None
    end: str
    """How the call ended, where it ended in this span."""
    text: str


class NodeRow(msgspec.Struct, frozen=True):
    node: int
    level: int
    """Branch points above it."""
    key: str
    cause: str
    """Why it branched here."""
    num_context: int
    num_trained: int
    num_masked: int
    roles: tuple[Role, ...]
    """Roles of the calls that made it, in order."""
    calls: tuple[CallId, ...]
    versions: tuple[int, ...]
    num_children: int
    spans: tuple[SpanRow, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_context + self.num_trained + self.num_masked


def tree_rows(tree: TrajectoryTree, roles: Mapping[CallId, Role], decode: Decode | None = None) -> list[NodeRow]:
    """All nodes in the order of the tree. `decode` adds the text of every span."""
    levels: dict[int, int] = {-1: -1}
    rows: list[NodeRow] = []
    for node in tree.nodes:
        levels[node.node] = levels[node.parent] + 1
        spans = tuple(_span_row(tree, node, span, roles, decode) for span in node.spans)
        counts = {
            origin: sum(span.num_tokens for span in spans if span.origin == origin) for origin in ("context", "trained", "masked")
        }
        calls = tuple(dict.fromkeys(span.call for span in node.spans))
        rows.append(
            NodeRow(
                node=node.node,
                level=levels[node.node],
                key=node.key,
                cause=node.cause.value,
                num_context=counts["context"],
                num_trained=counts["trained"],
                num_masked=counts["masked"],
                roles=tuple(dict.fromkeys(roles[call] for call in calls)),
                calls=calls,
                versions=tuple(sorted({version for span in spans for version in span.versions})),
                num_children=len(node.children),
                spans=spans,
            )
        )
    return rows


def _span_row(tree: TrajectoryTree, node: TreeNode, span: Span, roles: Mapping[CallId, Role], decode: Decode | None) -> SpanRow:
    call = tree.calls[span.call]
    versions: tuple[int, ...] = ()
    mean_logprob = None
    if span.is_sampled:
        sampled = slice(span.first_sampled, span.first_sampled + span.num_tokens)
        versions = tuple(dict.fromkeys(call.version_S[sampled].tolist()))
        mean_logprob = float(call.logprob_S[sampled].mean())
    origin = "context" if not span.is_sampled else "trained" if is_target(span, roles) else "masked"
    ends = any(at == span.stop and ended == span.call for at, ended in node.ends)
    return SpanRow(
        start=node.depth + span.start,
        num_tokens=span.num_tokens,
        origin=origin,
        call=span.call,
        role=roles[span.call],
        versions=versions,
        servers=tuple(call.servers) if span.is_sampled else (),
        mean_logprob=mean_logprob,
        end=_end(tree, span.call) if ends else "",
        text=decode(node.token_ids[span.start : span.stop].tolist()) if decode else "",
    )


def _end(tree: TrajectoryTree, call: CallId) -> str:
    finished = tree.calls[call].finished
    if finished is None:
        return "running"
    return f"{finished.reason}, abandoned" if finished.abandoned else finished.reason


def short(call: CallId) -> str:
    """A call without its execution.

    >>> short("e000001-2/c7")
    'c7'
    """
    return call.rpartition("/")[2]


def numbers(values: tuple[int, ...]) -> str:
    """
    >>> numbers((3, 4, 5, 9))
    '3-5, 9'
    """
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
