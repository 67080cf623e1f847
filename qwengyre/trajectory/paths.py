"""The candidates for training: paths from the root to a last trainable token.

A path ends at a trainable token after which no other trainable token comes, so what follows it (tool results nobody answered, answers
the client never got) is not computed. Side calls are not candidates, and none of their tokens is trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from qwengyre.core.arrays import FLAG
from qwengyre.core.ids import CallId
from qwengyre.core.records import PathSegment, Role
from qwengyre.trajectory.tree import Span, TrajectoryTree, TreeNode


class CandidatePath(msgspec.Struct, frozen=True):
    """A path from the root to a last trainable token, which may become a trajectory."""

    role: Role
    """Role of the call that sampled the last trainable token."""
    call: CallId
    segments: tuple[PathSegment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.segments)


def is_target(span: Span, roles: Mapping[CallId, Role]) -> bool:
    """Whether a span is trained by someone: trainable, and not of a side call."""
    return span.trainable and roles[span.call] is not Role.SIDE


def num_targets(tree: TrajectoryTree, roles: Mapping[CallId, Role]) -> list[int]:
    """Trainable tokens of every node, side calls left out."""
    return [sum(span.num_tokens for span in node.spans if is_target(span, roles)) for node in tree.nodes]


def candidate_paths(tree: TrajectoryTree, roles: Mapping[CallId, Role]) -> list[CandidatePath]:
    """All paths that end in a last trainable token, in the order of the tree. Together they visit every trainable token."""
    targets_below = [False] * len(tree.nodes)
    ends: list[tuple[int, Span]] = []
    for node in reversed(tree.nodes):
        last = next((span for span in reversed(node.spans) if is_target(span, roles)), None)
        if last is not None and not targets_below[node.node]:
            ends.append((node.node, last))
        if node.parent >= 0 and (last is not None or targets_below[node.node]):
            targets_below[node.parent] = True
    return [CandidatePath(roles[span.call], span.call, tree.segments_to(node, span.stop)) for node, span in reversed(ends)]


def target_T(node: TreeNode, roles: Mapping[CallId, Role]) -> np.ndarray:
    """bool: which tokens of a node are trained by someone."""
    target_T = np.zeros(node.num_tokens, FLAG)
    for span in node.spans:
        target_T[span.start : span.stop] = is_target(span, roles)
    return target_T
