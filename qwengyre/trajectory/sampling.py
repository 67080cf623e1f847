"""Bounded, role-prioritized, deduplicating sampling of trajectories (arXiv 2609.33848, trajectory processor)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qwengyre.core.arrays import FLAG, LOGPROB, TOKEN, VERSION, pack
from qwengyre.core.ids import CallId
from qwengyre.core.records import ROLE_PRIORITY, Role, Trajectory
from qwengyre.trajectory.paths import CandidatePath, candidate_paths, num_targets, target_T
from qwengyre.trajectory.tree import TrajectoryTree


def sample_trajectories(
    tree: TrajectoryTree, roles: Mapping[CallId, Role], *, j_max: int | None, rng: np.random.Generator
) -> tuple[Trajectory, ...]:
    """Draw paths until no trainable token is left or `j_max` are taken (None: no cap).

    Each time: from the best class of `ROLE_PRIORITY` that still has unmasked trainable tokens, draw a path with probability proportional
    to its unmasked trainable tokens, then mask all of it. Every trainable token is thus trained at most once, and exactly
    once without a cap. Nodes are counted whole, also the last one of a path: it ends after its last trainable token.
    """
    targets = num_targets(tree, roles)
    paths = candidate_paths(tree, roles)
    unmasked = [sum(targets[part.node] for part in path.segments) for path in paths]
    visitors: dict[int, list[int]] = {}
    for index, path in enumerate(paths):
        for part in path.segments:
            visitors.setdefault(part.node, []).append(index)
    masked: set[int] = set()
    chosen: list[Trajectory] = []
    while j_max is None or len(chosen) < j_max:
        drawn = _draw(paths, unmasked, rng)
        if drawn is None:
            break
        fresh = {part.node for part in drawn.segments} - masked
        chosen.append(_trajectory(tree, drawn, roles, fresh))
        for node in fresh:
            for index in visitors[node]:
                unmasked[index] -= targets[node]
        masked |= fresh
    return tuple(chosen)


def chosen_trajectories(tree: TrajectoryTree, roles: Mapping[CallId, Role], choice: Sequence[int]) -> tuple[Trajectory, ...]:
    """The candidates of these places (`candidate_paths`), in this order. What an earlier one trains a later one does not; one that has
    nothing left to train is left out. Raises IndexError for a place that no candidate has."""
    targets, paths = num_targets(tree, roles), candidate_paths(tree, roles)
    masked: set[int] = set()
    chosen: list[Trajectory] = []
    for place in choice:
        fresh = {part.node for part in paths[place].segments} - masked
        if any(targets[node] for node in fresh):
            chosen.append(_trajectory(tree, paths[place], roles, fresh))
        masked |= fresh
    return tuple(chosen)


def _draw(paths: list[CandidatePath], unmasked: list[int], rng: np.random.Generator) -> CandidatePath | None:
    for role in ROLE_PRIORITY:
        of_class = [index for index, path in enumerate(paths) if path.role is role and unmasked[index]]
        if of_class:
            bounds = np.cumsum([unmasked[index] for index in of_class])
            return paths[of_class[int(np.searchsorted(bounds, rng.integers(bounds[-1]), side="right"))]]
    return None


def _trajectory(tree: TrajectoryTree, path: CandidatePath, roles: Mapping[CallId, Role], fresh: set[int]) -> Trajectory:
    """`fresh`: the nodes of the path that no trajectory before it has trained."""
    logprob_T, version_T = tree.behavior_T(path.segments)
    trainable_T = np.zeros(path.num_tokens, FLAG)
    position = 0
    for part in path.segments:
        if part.node in fresh:
            trainable_T[position : position + part.num_tokens] = target_T(tree.nodes[part.node], roles)[: part.num_tokens]
        position += part.num_tokens
    return Trajectory(
        role=path.role,
        segments=path.segments,
        token_ids_T=pack(tree.token_ids_T(path.segments), TOKEN),
        trainable_T=pack(trainable_T, FLAG),
        logprob_T=pack(logprob_T, LOGPROB),
        version_T=pack(version_T, VERSION),
        routes_T=tree.routes_T(path.segments),
    )
