"""Two lower bounds on the time of a run that no policy under the dispatch rule can beat. Hours.

Derived in docs/reading-a-simulation.md. Both hold for the very durations of one seed, so a result may be compared with them
seed by seed.
"""

from __future__ import annotations

import numpy as np

from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.durations import Durations
from qwengyre.sim.servers import decode_rate
from qwengyre.sim.workload import Workload


def work_bound(workload: Workload, durations: Durations) -> float:
    """Work conservation: all rollout and training work, divided by all nodes, every node busy from start to end.

    An execution occupies a slot for at least min(d, timeout); on loaded servers it makes at least min(d, timeout * r) of
    progress, and a node makes at most slots_per_node * r a second, with r the rate on a full server. An execution that a loaded
    server could drop counts no training.
    """
    rate = decode_rate(workload, workload.slots(workload.nodes), workload.nodes)
    cap_s = workload.overall_timeout_h * 3600 * rate
    slots = max(workload.slots(workload.cell_nodes) / workload.cell_nodes, workload.slots(workload.nodes) / workload.nodes)
    rollout_s = np.minimum(durations.unloaded_GN, cap_s).sum() / (slots * rate)
    training_s = durations.train_GN[durations.unloaded_GN <= cap_s].sum()
    return float(rollout_s + training_s) / workload.nodes / 3600


def path_bound(workload: Workload, config: SchedulerConfig, durations: Durations) -> float:
    """The longest chain that the dispatch rule forces, burst by burst.

    The burst after version v trains mu * B groups, and none of them before v is published. At best the groups dispatched before
    are all ready at that moment; of those dispatched now, the j-th to be ready takes at least the j-th smallest duration (the
    slowest execution of a group). From each such moment on, the groups that are still to come have to be trained on all nodes, and
    each step that they close pays its optimizer.
    """
    ended_GN = np.minimum(durations.unloaded_GN, workload.overall_timeout_h * 3600)
    rate = decode_rate(workload, workload.slots(workload.nodes), workload.nodes)
    is_trained_GN = durations.unloaded_GN <= workload.overall_timeout_h * 3600 * rate
    ready_G = ended_GN.max(axis=1)
    work_G = (durations.train_GN * is_trained_GN).sum(axis=1) / workload.nodes
    total_s, version, num_before = 0.0, 0, 0
    while version < config.steps:
        end = config.burst_end(version)
        due = config.num_groups_due(version)
        total_s += _burst_s(
            workload,
            config,
            end - version,
            np.sort(ready_G[num_before:due]),
            work_G[:due],
            num_before - version * config.groups_per_step,
        )
        num_before, version = due, end
    return total_s / 3600


def _burst_s(
    workload: Workload, config: SchedulerConfig, num_steps: int, ready_sorted: np.ndarray, work_G: np.ndarray, num_ahead: int
) -> float:
    """Least time from a publish to the next, with `num_ahead` groups dispatched before it that may all be ready."""
    num = num_steps * config.groups_per_step
    ahead = min(num, max(0, num_ahead))
    at_J = np.concatenate([np.zeros(ahead), ready_sorted[: num - ahead]])
    num_left_J = num - np.arange(num)
    lightest = np.concatenate([[0.0], np.cumsum(np.sort(work_G)[:num])])
    work_J = lightest[num_left_J]
    optimizer_J = np.ceil(num_left_J / config.groups_per_step) * workload.optimizer_s
    return float((at_J + work_J + optimizer_J).max()) + workload.publish_s
