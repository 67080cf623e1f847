"""Lower bounds on the time of a run that no policy under the dispatch rule can beat. Hours. Proofs in docs/scheduler.md.

All hold for the very durations of one seed, so a result may be compared with them seed by seed; all but the work bound are
those of one mu, phi and cap on staleness.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np

from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.durations import Durations
from qwengyre.sim.servers import decode_rate
from qwengyre.sim.settings import Pool
from qwengyre.sim.workload import Workload

BISECTIONS: Final = 40
"""A thousandth of a second of a year."""

replace = msgspec.structs.replace


class LowerBounds(msgspec.Struct, frozen=True):
    """Hours. No run with this setting and these durations is faster than any of them."""

    work: float
    """All work, every node busy from start to end."""
    path: float
    """The longest chain of publishes, executions and training that the dispatch rule and the cap on staleness force."""
    joint: float
    """Both at once: what a chain makes idle is not made up for. Never below the other two."""


class Least(NamedTuple):
    """What each group costs at least. Legend: G groups."""

    rollout_G: np.ndarray
    """node-seconds"""
    train_G: np.ndarray
    """node-seconds"""
    ready_G: np.ndarray
    """seconds from its dispatch until all its executions have ended"""


def least_cost(workload: Workload, config: SchedulerConfig, pool: Pool, durations: Durations) -> Least:
    """The least that each group costs on any server of this pool, whatever moves.

    An execution occupies a slot for at least min(d, timeout); on loaded servers it makes at least min(d, timeout * r) of
    progress, and a node makes at most slots per node * r a second, with r the rate on a full server. An execution whose moves
    could make it too late counts no training.
    """
    servers = [(config.slots_per_cell, pool.cell_nodes)]
    if config.num_standalone:
        servers.append((config.slots_per_standalone, pool.standalone_nodes))
    rates = [decode_rate(workload, slots, nodes) for slots, nodes in servers]
    per_node = max(slots * rate / nodes for (slots, nodes), rate in zip(servers, rates, strict=True))
    timeout_s = workload.overall_timeout_h * 3600
    cap_s = timeout_s * min(rates)
    stalls_s = most_moves(config) * workload.move_stall_s
    is_trained_GN = durations.unloaded_GN + stalls_s <= cap_s
    return Least(
        np.minimum(durations.unloaded_GN, cap_s).sum(axis=1) / per_node,
        (durations.train_GN * is_trained_GN).sum(axis=1),
        np.minimum(durations.unloaded_GN, timeout_s).max(axis=1),
    )


def most_moves(config: SchedulerConfig) -> int:
    """How often one execution is moved at most: by every cell once in a burst, in each burst in which it lives."""
    if not config.traits.switches:
        return 0
    num_bursts = -(-config.steps // config.steps_per_burst) if not config.tune else config.steps
    lived = num_bursts if config.max_staleness is None else min(num_bursts, config.max_staleness + 1)
    return config.num_cells * lived


def bounds(workload: Workload, config: SchedulerConfig, pool: Pool, durations: Durations) -> LowerBounds:
    """The three bounds of one setting. With `tune`, whose mu and phi change, those of any plans under its cap."""
    least = least_cost(workload, config, pool, durations)
    work_s = float(least.rollout_G.sum() + least.train_G.sum()) / workload.nodes
    end_s = 0.0
    if config.tune:
        deepest = config.max_staleness or 0
        config = replace(config, steps_per_burst=1, dispatch_depth=deepest, two_way=False, backlog=0.0)
        workload, end_s = replace(workload, publish_s=0.0), workload.publish_s  # how often it publishes is its own choice
    chains = _Chains(workload, config, least, _bursts(config))
    path_s = _longest(chains) + end_s
    heaviest_s = float(np.sort(durations.train_GN.sum(axis=1))[-config.groups_per_step :].sum())
    joint_s = max(_joint(pool, chains), _crew(pool, chains, heaviest_s)) + end_s
    return LowerBounds(work_s / 3600, path_s / 3600, max(work_s, path_s, joint_s) / 3600)


def least_hours(workload: Workload, config: SchedulerConfig, pool: Pool, durations: Durations) -> float:
    """The least bound of all mu and phi under the cap D of `config`: no run that keeps one mu and one phi is faster.

    A dispatch depth counts in whole groups, so that there are few: phi + mu <= D + 1. Raises ValueError without a cap.
    """
    if config.max_staleness is None:
        raise ValueError("max_staleness is unset: without a cap there is no least bound, the deepest dispatch has none")
    B, deepest = config.groups_per_step, config.max_staleness + 1
    return min(
        bounds(workload, replace(config, steps_per_burst=mu, dispatch_depth=groups / B, tune=False), pool, durations).joint
        for mu in range(1, min(deepest, config.steps) + 1)
        for groups in range((deepest - mu) * B + 1)
    )


class Burst(NamedTuple):
    begin: int
    """The version whose publish begins it."""
    end: int
    num_before: int
    """Groups dispatched before that publish."""
    num_due: int
    """Groups dispatched once it is published."""


def _bursts(config: SchedulerConfig) -> list[Burst]:
    found, version, before = [], 0, 0
    while version < config.steps:
        end, due = config.burst_end(version), config.num_groups_due(version)
        found.append(Burst(version, end, before, due))
        version, before = end, due
    return found


class _Chains:
    """Least time between two publishes. Publish k begins burst k; publish len(bursts) ends the run.

    With `tune`, bursts stand for steps, and publish k for the moment at which k steps are done.
    """

    def __init__(self, workload: Workload, config: SchedulerConfig, least: Least, bursts: list[Burst]):
        self.workload, self.config, self.least, self.bursts = workload, config, least, bursts
        self.train_s = least.train_G / workload.nodes
        self.into = [self._into_tuned(k) if config.tune else self._into(k) for k in range(1, len(bursts) + 1)]
        """For each publish but the first: (j, seconds), it comes so much after publish j at least."""

    def _into(self, k: int) -> list[tuple[int, float]]:
        burst = self.bursts[k - 1]
        found = [(k - 1, self._burst_s(burst))]
        for j, first in enumerate(self.bursts[:k]):
            due = self._due_step(first)
            if burst.begin < due <= burst.end:
                found.append((j, self._due_s(first, burst.end - due)))
        return found

    def _due_step(self, first: Burst) -> int:
        """Steps done when all groups that `first` dispatched are trained."""
        cap = self.config.max_staleness
        return self.config.steps if cap is None else min(first.begin + cap + 1, self.config.steps)

    def _into_tuned(self, k: int) -> list[tuple[int, float]]:
        """Of the first k * B groups that were trained, at least B were dispatched at version k - D - 1 or later, in order."""
        B, cap = self.config.groups_per_step, self.config.max_staleness or 0
        j = max(0, k - cap - 1)
        if j == 0 and k > 1:
            return [(k - 1, self._trained_s(np.zeros(B), np.sort(self.train_s)[:B]))]
        ready_G = np.sort(self.least.ready_G[j * B : (j + 2 * cap + 1) * B])[:B]
        return [(j, self._trained_s(ready_G, np.sort(self.train_s)[:B])), (k - 1, self.workload.optimizer_s)]

    def _burst_s(self, burst: Burst) -> float:
        """One burst: those dispatched before may all be ready; of those dispatched now the fastest may be trained, the lightest."""
        B, num = self.config.groups_per_step, (burst.end - burst.begin) * self.config.groups_per_step
        ahead = min(num, max(0, burst.num_before - burst.begin * B))
        ready_sorted = np.sort(self.least.ready_G[burst.num_before : burst.num_due])
        at_J = np.concatenate([np.zeros(ahead), ready_sorted[: num - ahead]])
        return self._trained_s(at_J, np.sort(self.train_s[: burst.num_due])[:num])

    def _due_s(self, first: Burst, num_later: int) -> float:
        """From the publish of `first` until all groups that it dispatched are trained, and `num_later` more steps are done."""
        chosen = slice(first.num_before, first.num_due)
        if chosen.start == chosen.stop:
            return 0.0
        order = np.argsort(self.least.ready_G[chosen], kind="stable")
        at_J, work_J = self.least.ready_G[chosen][order], self.train_s[chosen][order]
        left_J = np.cumsum(work_J[::-1])[::-1]
        num_J = np.arange(len(order), 0, -1)
        steps_J = np.ceil(num_J / self.config.groups_per_step)
        step_s = float(np.sort(self.train_s)[: self.config.groups_per_step].sum()) + self.workload.optimizer_s
        return float((at_J + left_J + steps_J * self.workload.optimizer_s).max()) + num_later * step_s + self.workload.publish_s

    def _trained_s(self, at_J: np.ndarray, lightest_sorted: np.ndarray) -> float:
        """Groups ready at `at_J`, sorted: from each moment on those that are still to come are trained on all nodes."""
        num_left_J = len(at_J) - np.arange(len(at_J))
        work_J = np.concatenate([[0.0], np.cumsum(lightest_sorted)])[num_left_J]
        steps_J = np.ceil(num_left_J / self.config.groups_per_step)
        return float((at_J + work_J + steps_J * self.workload.optimizer_s).max()) + self.workload.publish_s


def _longest(chains: _Chains) -> float:
    """The earliest end of the run by chains alone, seconds."""
    times = [0.0]
    for into in chains.into:
        times.append(max(times[j] + seconds for j, seconds in into))
    return times[-1]


def _joint(pool: Pool, chains: _Chains) -> float:
    """Chains and work at once: the earliest publishes, and the least node-time that is idle before each. Seconds."""
    workload, config, least = chains.workload, chains.config, chains.least
    B, nodes = config.groups_per_step, workload.nodes
    cost_G = least.rollout_G + least.train_G
    rollout_to, train_to, cost_to = (
        np.concatenate([[0.0], np.cumsum(of_G)]) for of_G in (least.rollout_G, least.train_G, cost_G)
    )
    times, idle = [0.0], pool.cell_nodes * workload.to_training_s
    for k, burst in enumerate(chains.bursts, start=1):
        due = burst.num_due
        forced = _num_forced(config, chains.bursts[:k], burst.end)
        others = burst.end * B - forced
        lightest = _sum_of(cost_G[forced:due], others, lightest=True)
        heaviest = _sum_of(least.train_G[forced:due], others, lightest=False)
        idle += pool.cell_nodes * ((burst.end - burst.begin) * workload.optimizer_s + workload.publish_s)
        at = max(times[j] + seconds for j, seconds in chains.into[k - 1])
        at = max(at, (idle + cost_to[forced] + lightest) / nodes)
        idle = max(idle, nodes * at - rollout_to[due] - train_to[forced] - heaviest)
        times.append(at)
    return float(times[-1])


def _crew(pool: Pool, chains: _Chains, heaviest_s: float) -> float:
    """Work, with what a crew of cells costs that trains a step together: overhead, and waiting in its optimizer. Seconds.

    The least T of which the nodes have enough: what they have rises with T, what is needed falls. `heaviest_s`: the most
    node-seconds that one step can train.
    """
    workload, config, least = chains.workload, chains.config, chains.least
    num_bursts, num_steps = (0 if config.tune else len(chains.bursts)), config.steps
    each = pool.cell_nodes / pool.num_replicas(workload)
    rollout_s, train_s = float(least.rollout_G.sum()), float(least.train_G.sum())
    serial_s = num_steps * workload.optimizer_s + num_bursts * workload.publish_s
    first_s = float(least.ready_G[: chains.bursts[0].num_due].min())
    if train_s == 0:
        return 0.0
    speeds = each / (1 + workload.replica_overhead * np.arange(config.num_cells * pool.num_replicas(workload)))

    def is_enough(total_s: float) -> bool:
        active_s = total_s - serial_s - first_s
        crew = _least_crew(speeds, train_s / active_s) if active_s > 0 else None
        if crew is None:
            return False
        members = max(float(num_steps) * pool.cell_nodes, train_s**2 / (heaviest_s * active_s))
        publishing = members if num_bursts == num_steps else num_bursts * pool.cell_nodes
        waiting = members * workload.optimizer_s + (0.0 if config.tune else publishing * workload.publish_s)
        needed = rollout_s + active_s * crew * each + waiting + pool.cell_nodes * workload.to_training_s
        return needed <= total_s * workload.nodes

    low = (rollout_s + train_s) / workload.nodes
    high = max(low, first_s) + serial_s + workload.to_training_s + 1.0
    while not is_enough(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low


def _least_crew(speeds: np.ndarray, needed: float) -> float | None:
    """How many replicas train at once on average, at least, to do `needed` node-seconds a second; None if all are too few."""
    together = np.cumsum(speeds)
    if needed > together[-1]:
        return None
    return float(np.interp(needed, np.concatenate([[0.0], together]), np.arange(len(together) + 1)))


def _sum_of(values: np.ndarray, num: int, *, lightest: bool) -> float:
    """Of the `num` smallest values, or of the largest."""
    if not 0 < num < len(values):
        return float(values.sum()) if num else 0.0
    kth = num - 1 if lightest else len(values) - num
    parted = np.partition(values, kth)
    return float((parted[:num] if lightest else parted[kth:]).sum())


def _num_forced(config: SchedulerConfig, bursts: list[Burst], end: int) -> int:
    """Groups, the first dispatched, that the cap has trained by the publish of `end`."""
    if end == config.steps:
        return bursts[-1].num_due
    if config.max_staleness is None or config.tune:
        return 0
    return max((burst.num_due for burst in bursts if burst.begin + config.max_staleness < end), default=0)
