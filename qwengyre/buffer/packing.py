"""From the executions of a ready group to micro-steps: the units of training work that cells claim.

A micro-step is one execution's tree, or several executions of the group as long as they fit a target together: they share their
prompt, which is then computed once. Only a tree over the hard budget is cut, between whole paths in depth-first order, so that as
little of their common ancestors as possible is computed twice. A path is never cut: its tokens must see each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from qwengyre.core.arrays import TOKEN, common_prefix, unpack
from qwengyre.core.ids import GroupId, MicroStepId
from qwengyre.core.records import MicroStep, PathSegment, TrainingExecution, Trajectory
from qwengyre.trajectory.config import TrajectoryConfig


def pack_group(executions: Sequence[TrainingExecution], step: int, config: TrajectoryConfig, max_tokens: int) -> list[MicroStep]:
    """Micro-steps of one group for optimizer step `step`, in the order of its executions; ids depend on these alone.

    Every trajectory is in exactly one micro-step. Executions without trajectories are in none. `max_tokens` is the trainer's
    `max_row_tokens`: no micro-step has more, whatever it shares, but for a single longer path, which the trainer refuses.
    """
    packs: list[_Pack] = []
    for whole in executions:
        for part in split_execution(whole, max_tokens):
            if not (packs and packs[-1].takes(part, config, max_tokens)):
                packs.append(_Pack(part))
    return [
        MicroStep(micro_step_id(step, pack.parts[0].group, index), step, tuple(pack.parts), pack.num_distinct)
        for index, pack in enumerate(packs)
    ]


def micro_step_id(step: int, group: GroupId, index: int) -> MicroStepId:
    """
    >>> micro_step_id(4, 12, 0)
    's000004-g000012-m0'
    """
    return MicroStepId(f"s{step:06d}-g{group:06d}-m{index}")


def split_execution(execution: TrainingExecution, max_tokens: int) -> list[TrainingExecution]:
    """Cut an execution into parts of at most `max_tokens` distinct tokens, one path at least; T_e stays the whole execution's.

    [] if there is nothing to compute.
    """
    parts: list[list[Trajectory]] = []
    room = 0
    for trajectory in sorted(
        execution.trajectories, key=lambda chosen: [(part.node, part.num_tokens) for part in chosen.segments]
    ):
        own = trajectory.num_tokens - (_num_shared(parts[-1][-1].segments, trajectory.segments) if parts else 0)
        if parts and own <= room:
            parts[-1].append(trajectory)
            room -= own
        else:
            parts.append([trajectory])
            room = max_tokens - trajectory.num_tokens
    return [msgspec.structs.replace(execution, trajectories=tuple(part)) for part in parts]


def num_distinct_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of one execution's paths, shared prefixes counted once."""
    longest: dict[int, int] = {}
    for trajectory in trajectories:
        for part in trajectory.segments:
            longest[part.node] = max(longest.get(part.node, 0), part.num_tokens)
    return sum(longest.values())


class _Pack:
    """A micro-step in the making."""

    def __init__(self, first: TrainingExecution):
        self.parts = [first]
        self.num_tokens = num_distinct_tokens(first.trajectories)
        """Without what executions share."""
        self.num_shared = self.num_tokens
        """Leading tokens that all its parts share."""

    @property
    def num_distinct(self) -> int:
        return self.num_tokens - (len(self.parts) - 1) * self.num_shared

    def takes(self, part: TrainingExecution, config: TrajectoryConfig, max_tokens: int) -> bool:
        """Add `part` if that keeps to the target, and to the budget even where nothing is shared in the end."""
        added = num_distinct_tokens(part.trajectories)
        shared = min(self.num_shared, _num_shared_prompt([self.parts[0], part]))
        total = self.num_tokens + added
        is_fit = (
            all(other.execution != part.execution for other in self.parts)
            and total <= max_tokens
            and total - len(self.parts) * shared <= config.micro_step_tokens
            and shared >= config.merge_min_shared_share * added
        )
        if is_fit:
            self.parts.append(part)
            self.num_tokens, self.num_shared = total, shared
        return is_fit


def _num_shared(one: tuple[PathSegment, ...], other: tuple[PathSegment, ...]) -> int:
    """Tokens that two paths of one tree share."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left.node != right.node:
            break
        shared += min(left.num_tokens, right.num_tokens)
    return shared


def _num_shared_prompt(executions: Sequence[TrainingExecution]) -> int:
    """Leading tokens that the first paths of two executions have in common, up to the first that either of them trains."""
    left, right = (unpack(execution.trajectories[0].token_ids_T, TOKEN) for execution in executions)
    most = min(len(left), len(right), *(_first_sampled(execution) for execution in executions))
    return common_prefix(left[:most], right[:most])


def _first_sampled(execution: TrainingExecution) -> int:
    versions = unpack(execution.trajectories[0].version_T, np.dtype("<i4"))
    sampled = np.flatnonzero(versions >= 0)
    return int(sampled[0]) if len(sampled) else len(versions)
