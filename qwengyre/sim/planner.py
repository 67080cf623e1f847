"""The search behind `qwengyre plan`: cells, mu, phi, backlog, standalone nodes and switches, by simulation, under a cap on staleness.

Three rounds: all (mu, phi), with and without a backlog, with one seed; variations of the best in backlog, cells, standalone nodes
and switches with one seed; the finalists with all seeds. The winner is then measured once more on seeds that nothing was chosen by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Final

import msgspec

from qwengyre.sim.bounds import least_hours
from qwengyre.sim.results import DurationSource, Result, simulate
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.workload import Workload

PHI_STEP: Final = 0.25
BACKLOGS: Final = (0.0, 1.0)
"""Of the first round. One step's worth is what a burst of one step ends, so it keeps the slots full until the next publish."""
BACKLOG_STEP: Final = 0.25
"""Of the variations; half a cell or so on usual pools."""
NUM_VARIED: Final = 5
NUM_FINALISTS: Final = 6
NUM_FRONT: Final = 6
FRESH_FROM: Final = 1_000_000
"""Fresh seeds start here, far from those that a user names."""

replace = msgspec.structs.replace


class Plan(msgspec.Struct, frozen=True):
    """What the search found. All results but `tried` are means over all seeds."""

    max_staleness: int
    base: Result
    """The workload as it is: the paper's policy with its own mu and phi."""
    best: list[Result]
    """The fastest first; none is staler than `max_staleness`."""
    front: list[Result]
    """No other finalist, nor the workload as it is, is both faster and fresher; by mean staleness."""
    tried: list[Result]
    """Everything that was simulated, with the first seed only."""
    first_base: Result
    """The workload as it is, with the first seed only: what `tried` can be compared with."""
    least_bound: float
    """Hours: the least bound of all mu and phi under the cap, mean over the seeds."""
    fresh_base: Result
    fresh_best: Result
    """The workload as it is, and the winner, on as many seeds that nothing was chosen by."""

    @property
    def saving(self) -> float:
        """Share of the time that the winner saves, on fresh seeds."""
        return 1 - self.fresh_best.hours / self.fresh_base.hours


def plan(source: DurationSource, seeds: Sequence[int], pool: Executor, *, max_staleness: int | None = None) -> Plan:
    """Search the settings of elastic scheduling for one workload.

    `max_staleness` unset is the maximum that the workload's own setting shows. Raises ValueError if it is below 0.
    """
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(
            f"max_staleness = {max_staleness}: at least 0, which trains each step on what its own version dispatched"
        )
    workload = source.workload
    base = simulate(source, [Setting()], seeds, pool)[0]
    cap = base.staleness_max if max_staleness is None else max_staleness
    first = list(seeds)[:1]
    first_base = simulate(source, [Setting()], first, pool)[0]
    tried = simulate(source, depths(workload, cap), first, pool)
    leaders = [*_fastest(tried, NUM_VARIED), *_thinned(pareto(tried), NUM_VARIED)]
    new = _without(variations(workload, [result.settings for result in leaders]), tried)
    tried += simulate(source, new, first, pool)
    chosen = [*_fastest(tried, NUM_FINALISTS), *_thinned(pareto(tried), NUM_FRONT)]
    finalists = simulate(source, _distinct(result.settings for result in chosen), seeds, pool)
    best = _fastest(finalists, NUM_FINALISTS)
    fresh = [FRESH_FROM + index for index in range(len(seeds))]
    fresh_base, fresh_best = simulate(source, [Setting(), best[0].settings], fresh, pool)
    front = pareto([*finalists, base])
    return Plan(cap, base, best, front, tried, first_base, _least_bound(source, cap, seeds), fresh_base, fresh_best)


def _least_bound(source: DurationSource, cap: int, seeds: Sequence[int]) -> float:
    workload = source.workload
    config, pool = build(workload, Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=cap))
    return sum(least_hours(workload, config, pool, source.durations(seed)) for seed in seeds) / len(seeds)


def depths(workload: Workload, cap: int) -> list[Setting]:
    """All (mu, phi) whose dispatch depth the cap allows, phi + mu <= cap + 1, with and without a backlog."""
    settings = []
    for mu in range(1, min(cap + 1, workload.steps) + 1):
        for index in range(int((cap + 1 - mu) / PHI_STEP) + 1):
            for backlog in BACKLOGS:
                depth = index * PHI_STEP
                bare = Setting(steps_per_burst=mu, dispatch_depth=depth, two_way=True, backlog=backlog, max_staleness=cap)
                settings.append(bare if workload.foresight_error is None else replace(bare, order="longest-first"))
    return settings


def variations(workload: Workload, settings: Iterable[Setting]) -> list[Setting]:
    """Each setting with other backlogs, coarser cells, some standalone nodes, and with all cells given back at a boundary."""
    cell = workload.cell_nodes
    varied = []
    for setting in settings:
        varied.append(replace(setting, two_way=False, backlog=0.0))
        varied += [replace(setting, backlog=max(0.0, setting.backlog + steps * BACKLOG_STEP)) for steps in (-2, -1, 1, 2)]
        varied += [replace(setting, cell_nodes=nodes) for nodes in (2 * cell, 3 * cell)]
        varied += [replace(setting, standalone_nodes=nodes) for nodes in (cell, 2 * cell)]
    return [setting for setting in _distinct(varied) if _fits(workload, setting)]


def _fits(workload: Workload, setting: Setting) -> bool:
    try:
        config, _ = build(workload, setting)
    except ValueError:
        return False
    return config.num_cells >= 2


def pareto(results: Sequence[Result]) -> list[Result]:
    """The results that no other beats in both hours and mean staleness, freshest first.

    >>> pareto([])
    []
    """
    front: list[Result] = []
    for result in sorted(results, key=lambda r: (r.staleness_mean, r.hours)):
        if not front or result.hours < front[-1].hours:
            front.append(result)
    return front


def _fastest(results: Sequence[Result], num: int) -> list[Result]:
    return sorted(results, key=lambda result: result.hours)[:num]


def _thinned(results: Sequence[Result], most: int) -> list[Result]:
    """At most `most` results, evenly along the front."""
    step = max(1, -(-len(results) // most))
    return list(results[::step])


def _distinct(settings: Iterable[Setting]) -> list[Setting]:
    return list({msgspec.json.encode(setting): setting for setting in settings}.values())


def _without(settings: Sequence[Setting], tried: Sequence[Result]) -> list[Setting]:
    known = [result.settings for result in tried]
    return [setting for setting in settings if setting not in known]


def plan_toml(workload: Workload, setting: Setting) -> str:
    """The `[scheduler]` table of a run file with this setting."""
    config, pool = build(workload, setting)
    lines = [
        "[scheduler]",
        f'policy = "{config.policy}"',
        f"num_cells = {config.num_cells}  # of {pool.cell_nodes} nodes each",
        f"slots_per_cell = {config.slots_per_cell}",
    ]
    if config.num_standalone:
        lines += [f"num_standalone = {config.num_standalone}  # of {pool.standalone_nodes} nodes"]
        lines += [f"slots_per_standalone = {config.slots_per_standalone}"]
    lines += [
        f"steps = {config.steps}",
        f"groups_per_step = {config.groups_per_step}",
        f"executions_per_group = {config.executions_per_group}",
        f"steps_per_burst = {config.steps_per_burst}",
        f"dispatch_depth = {config.dispatch_depth}",
        f"two_way = {str(config.two_way).lower()}",
        f"backlog = {config.backlog}",
    ]
    if config.order != "dispatch":
        lines.append(f'order = "{config.order}"')
    if config.max_staleness is not None:
        lines.append(f"max_staleness = {config.max_staleness}")
    return "\n".join(lines) + "\n"
