"""From the finished executions of one rollout group to what is trained: roles, advantages, chosen trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from qwengyre.core.arrays import FLAG, unpack
from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.core.records import Outcome, TrainingExecution, Trajectory, Validity
from qwengyre.trajectory.advantages import group_advantages
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.harness_rules import BUILTIN, HarnessRules
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.sampling import chosen_trajectories, sample_trajectories
from qwengyre.trajectory.tree import TrajectoryTree


class FinishedExecution(msgspec.Struct, frozen=True):
    """One execution that has ended: what it said and what it is worth."""

    execution: ExecutionId
    tree: TrajectoryTree
    outcome: Outcome


class Judgement(msgspec.Struct, frozen=True):
    """What hooks of the user's own said of a group, by execution in order. Journalled: a hook is never asked twice."""

    advantages: tuple[float | None, ...]
    """None: left out of the group."""
    choices: tuple[tuple[int, ...] | None, ...]
    """Places in `candidate_paths`, in the order in which they are trained; None: drawn by the built-in rule."""


def process_group(
    group: GroupId,
    finished: Sequence[FinishedExecution],
    config: TrajectoryConfig,
    *,
    seed: int,
    rules: Sequence[HarnessRules] = BUILTIN,
    judgement: Judgement | None = None,
) -> list[TrainingExecution]:
    """One record for every execution that counts (E of the step's loss is their number); dropped ones are left out.

    Executions with nothing to compute (placeholder, advantage 0, no trainable token) have no trajectories, but stand in the list. The
    choice depends on `seed` and the execution's id only, or on `judgement`. Raises RecordError for records that do not join.
    """
    if judgement is None:
        advantages = group_advantages([execution.outcome for execution in finished], divide_by_std=bool(config.divide_by_std))
        judgement = Judgement(tuple(advantages), (None,) * len(finished))
    processed: list[TrainingExecution] = []
    for execution, advantage, choice in zip(finished, judgement.advantages, judgement.choices, strict=True):
        if advantage is None:
            continue
        trajectories: tuple[Trajectory, ...] = ()
        temperature = 1.0
        if execution.outcome.validity is Validity.VALID and (advantage or config.keep_zero_advantage):
            roles = assign_roles(execution.tree.calls, rules)
            temperature = execution.tree.temperature
            if choice is None:
                rng = execution_rng(seed, execution.execution)
                trajectories = sample_trajectories(execution.tree, roles, j_max=config.max_trajectories, rng=rng)
            else:
                trajectories = chosen_trajectories(execution.tree, roles, choice)
        processed.append(
            TrainingExecution(
                execution=execution.execution,
                group=group,
                advantage=advantage,
                temperature=temperature,
                trajectories=trajectories,
                num_trainable=sum(int(unpack(chosen.trainable_T, FLAG).sum()) for chosen in trajectories),
            )
        )
    return processed


def execution_rng(seed: int, execution: ExecutionId) -> np.random.Generator:
    """The randomness of one execution's sampling: equal wherever and whenever it is processed."""
    key = int.from_bytes(blake2b(execution.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng([seed, key])
