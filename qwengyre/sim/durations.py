"""How long executions take and how much training they make: drawn once for a seed, the same for every policy.

Legend: G groups, N executions of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwengyre.sim.trees import tree_cost
from qwengyre.sim.workload import Workload


class Durations:
    """Unloaded durations in seconds, and the node-seconds of training that each execution makes."""

    expected_G: np.ndarray | None = None
    """float64, seconds: what is known of each group before it is dispatched, if anything is."""

    def __init__(self, unloaded_GN: np.ndarray, train_GN: np.ndarray, num_micro_steps: int):
        self.unloaded_GN = unloaded_GN
        """float64, seconds; the overall timeout is not applied."""
        self.train_GN = train_GN
        """float64, node-seconds"""
        self._num_micro_steps = num_micro_steps

    @classmethod
    def draw(cls, workload: Workload, seed: int) -> Durations:
        """Draw from the workload's log-normal. Equal (workload, seed) give equal durations, whatever the policy."""
        rng = np.random.default_rng(seed)
        shape = workload.num_groups, workload.executions_per_group
        z_G = rng.standard_normal(shape[0])
        z_GN = rng.standard_normal(shape)
        hours_GN = workload.median_h * np.exp(workload.sigma_query * z_G[:, None] + workload.sigma_execution * z_GN)
        t = workload.train_share_by_duration
        share = (
            workload.train_node_hours_per_step
            * tree_cost(workload.distinct_share)
            / (workload.groups_per_step * workload.executions_per_group)
        )
        train_GN = share * ((1 - t) + t * hours_GN / hours_GN.mean())
        drawn = cls(hours_GN * 3600, train_GN * 3600, workload.micro_steps_per_group)
        if workload.foresight_error is not None:
            errors_G = workload.foresight_error * rng.standard_normal(shape[0])
            drawn.expected_G = workload.median_h * 3600 * np.exp(workload.sigma_query * z_G + errors_G)
        return drawn

    def micro_steps_s(self, group: int, dropped: Sequence[int]) -> list[float]:
        """Node-seconds of each micro-step of a group; dropped executions are not trained."""
        work_N = self.train_GN[group]
        work = float(work_N.sum() - work_N[list(dropped)].sum())
        return [work / self._num_micro_steps] * self._num_micro_steps


class MeasuredDurations(Durations):
    """Durations of a real run; its micro-steps are as many and as long as they were."""

    def __init__(self, unloaded_GN: np.ndarray, micro_steps_G: Sequence[Sequence[float]]):
        num = unloaded_GN.shape[1]
        train_GN = np.array([[sum(steps) / num] * num for steps in micro_steps_G])
        super().__init__(unloaded_GN, train_GN, 0)
        self._micro_steps_G = micro_steps_G

    def micro_steps_s(self, group: int, dropped: Sequence[int]) -> list[float]:
        return list(self._micro_steps_G[group])
