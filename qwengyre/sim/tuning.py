"""`scheduler.tune`: plans mu, phi, two_way, backlog and order again from what a run has shown so far, by simulating the steps that are left.

What a run showed is `Evidence`, small and picklable, so that a plan is made in another process. `replan` is pure: equal evidence
gives an equal plan. Nothing here decides when: a driver asks after a step, and tells the scheduler with a `Retuned`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import OrderName, SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.history import MIN_EXECUTION_S, MIN_MICRO_STEP_S, History, MeasuredGroup, MeasuredRun
from qwengyre.sim.settings import Pool
from qwengyre.sim.workload import MAX_SIGMA

WINDOW_STEPS: Final = 8
"""Steps' worth of groups, the last dispatched, that a plan is made from: an agent's executions change as it learns."""
HORIZON_STEPS: Final = 24
"""At most this many steps are simulated: enough that the first burst, which starts from nothing, weighs little."""
FEWEST_STEPS_LEFT: Final = 3
"""With fewer left, all groups are dispatched already, so that no plan changes anything."""
SEEDS: Final = (1, 2)
"""Of the draws from the evidence. Seed 0 would replay the groups in their order, of which there may be few."""
NEWS: Final = 0.25
MAX_STEPS_BETWEEN: Final = 4
"""A plan is made again after a quarter more steps than at the last one, and at most this many steps later: half a window."""
MIN_GAIN: Final = 0.01
"""A plan is adopted if it is faster by this share: less is the noise of two draws."""
DEPTH_STEPS: Final = (0.0, 0.5, 1.0)
"""How far below the deepest dispatch depth that the cap allows, in steps."""
BACKLOGS: Final = (0.0, 0.5, 1.0)
NUM_VARIED: Final = 3
FORESEEN_SHARE: Final = 0.5
"""Of the groups that a plan is made from: with less known, an order goes mostly by the mean, which the simulation does not show."""
FEWEST_FORESEEN: Final = 4
"""A standard deviation of fewer says little."""
BACKLOG_STEP: Final = 0.25

replace = msgspec.structs.replace


class Evidence(msgspec.Struct, frozen=True):
    """What a plan is made from."""

    run: MeasuredRun
    config: SchedulerConfig
    """What is decided by now."""
    steps_done: int


class Replanned(msgspec.Struct, frozen=True):
    """The fields of a `Retuned`."""

    steps_per_burst: int
    dispatch_depth: float
    two_way: bool
    backlog: float
    order: OrderName
    reason: str


class Tuner:
    """Sees a run, and says what a plan is made from. Equal histories give equal evidence."""

    def __init__(self, history: History | None = None) -> None:
        self.history = history or History()
        self._due = 1
        """Steps done at which the next plan is worth its cost."""

    def evidence(self, config: SchedulerConfig, steps_done: int, now: float) -> Evidence | None:
        """`config` is what is decided by, or will be from the next publish on.

        None before a group was trained on, soon after the last evidence, and when too few steps are left.
        """
        if steps_done < self._due or config.steps - steps_done < FEWEST_STEPS_LEFT:
            return None
        history = self.history
        trained = {group: [history.computed[name] for name in names] for group, names in history.trained_groups()}
        if not trained:
            return None
        train = [group for group, kind in history.kinds.items() if kind == "train" and group in history.members]
        recent = train[-WINDOW_STEPS * config.groups_per_step :]
        typical = tuple(max(MIN_MICRO_STEP_S, seconds) for seconds in _typical(trained.values()))
        durations = self._durations([name for group in recent for name in history.members[group]], now)
        groups = tuple(
            MeasuredGroup(
                tuple(durations[name] for name in history.members[group]),
                tuple(max(MIN_MICRO_STEP_S, seconds) for seconds in trained.get(group, ())) or typical,
            )
            for group in recent
        )
        self._due = steps_done + min(MAX_STEPS_BETWEEN, max(1, math.ceil(NEWS * steps_done)))
        left = replace(config, steps=config.steps - steps_done)
        workload = replace(history.workload(left, groups), foresight_error=_foresight_error(history, recent))
        return Evidence(MeasuredRun(workload, groups), left, steps_done)

    def _durations(self, names: Sequence[ExecutionId], now: float) -> dict[ExecutionId, float]:
        """Of each execution. One that still runs takes as long as one that took longer than it has so far, in turn.

        That is the product-limit estimate (Kaplan and Meier 1958), without which those that ended first would stand for all.
        """
        history = self.history
        known = {name: max(MIN_EXECUTION_S, history.lived[name][1]) for name in names if name in history.lived}
        ended = np.sort(list(known.values()))
        found = dict(known)
        for index, name in enumerate(name for name in names if name not in known):
            age = max(MIN_EXECUTION_S, now - history.started[name][1])
            longer = ended[np.searchsorted(ended, age, side="right") :]
            found[name] = float(longer[index % len(longer)]) if len(longer) else age
        return found


def retuner() -> Callable[[Scheduler, ev.Event, Sequence[cmd.Command]], ev.Retuned | None]:
    """What a simulated run is tuned by: after a step the plan is there at once."""
    tuner = Tuner()

    def retune(scheduler: Scheduler, event: ev.Event, commands: Sequence[cmd.Command]) -> ev.Retuned | None:
        tuner.history.see(event, commands)
        if not isinstance(event, ev.StepDone):
            return None
        evidence = tuner.evidence(scheduler.planned, scheduler.state.steps_done, event.at)
        replanned = replan(evidence) if evidence is not None else None
        return ev.Retuned(event.at, **msgspec.structs.asdict(replanned)) if replanned is not None else None

    return retune


def _foresight_error(history: History, recent: Sequence[GroupId]) -> float | None:
    """Spread of the log of what groups took over what was foreseen of them. None if that was said of fewer than half."""
    errors = history.foresight_errors(set(recent))
    if len(errors) < max(FEWEST_FORESEEN, FORESEEN_SHARE * len(recent)):
        return None
    return min(float(np.std(errors)), MAX_SIGMA)


def _typical(micro_steps: Iterable[Sequence[float]]) -> list[float]:
    """Of a group that was not trained on yet: as many as on average, each as long as on average."""
    some = list(micro_steps)
    num = round(float(np.mean([len(seconds) for seconds in some])))
    flat = [value for seconds in some for value in seconds]
    return [float(np.mean(flat))] * num if flat else []


def replan(evidence: Evidence) -> Replanned | None:
    """The fastest plan for the steps that are left, or None if none is worth a change. Costs some dozens of short simulations."""
    now = evidence.config
    hours: dict[bytes, float] = {}

    def cost(config: SchedulerConfig, seed: int) -> float:
        key = msgspec.msgpack.encode((config, seed))
        if key not in hours:
            hours[key] = _hours(evidence, config, seed)
        return hours[key]

    known = evidence.run.workload.foresight_error
    first = sorted(
        depths(now if known is None else replace(now, order="longest-first")), key=lambda config: cost(config, SEEDS[0])
    )[:NUM_VARIED]
    unordered = [] if known is None else [replace(config, order="dispatch") for config in first]
    varied = _distinct([*first, *variations(first), *unordered])
    best_few = sorted(varied, key=lambda config: cost(config, SEEDS[0]))[:NUM_VARIED]

    def mean(config: SchedulerConfig) -> float:
        return sum(cost(config, seed) for seed in SEEDS) / len(SEEDS)

    best = min(best_few, key=mean)
    gain = 1 - mean(best) / mean(now)
    if gain < MIN_GAIN:
        return None
    steps = min(now.steps, HORIZON_STEPS)
    reason = (
        f"after step {evidence.steps_done}: the next {steps} steps in {mean(best):.3g} h instead of {mean(now):.3g} h, "
        f"simulated with {len(evidence.run.groups)} groups as they were ({len(hours)} simulations)"
    )
    if known is not None:
        reason += f"; how long groups take was foreseen within a factor of {math.exp(known):.2f}"
    return Replanned(best.steps_per_burst, best.dispatch_depth, best.two_way, best.backlog, best.order, reason)


def depths(config: SchedulerConfig) -> list[SchedulerConfig]:
    """Every mu with the deepest phi that the cap on staleness allows and some below, each with some backlogs."""
    assert config.max_staleness is not None  # `tune` wants it
    deepest = config.max_staleness + 1
    found = []
    for mu in range(1, min(deepest, config.steps) + 1):
        for phi in dict.fromkeys(max(0.0, deepest - mu - less) for less in DEPTH_STEPS):
            for backlog in BACKLOGS:
                found.append(replace(config, steps_per_burst=mu, dispatch_depth=phi, two_way=True, backlog=backlog))
    return found


def variations(configs: Sequence[SchedulerConfig]) -> list[SchedulerConfig]:
    """Each with backlogs beside its own, and with all cells given back at a publish."""
    beside = [
        replace(config, backlog=max(0.0, config.backlog + step)) for config in configs for step in (-BACKLOG_STEP, BACKLOG_STEP)
    ]
    return [*beside, *(replace(config, two_way=False, backlog=0.0) for config in configs)]


def _hours(evidence: Evidence, config: SchedulerConfig, seed: int) -> float:
    """Of the next steps, from an empty pool: what runs now is the same for every plan."""
    steps = min(config.steps, HORIZON_STEPS)
    workload = replace(evidence.run.workload, steps=steps)
    bare = replace(config, steps=steps, tune=False, evaluate_at_start=False, evaluate_at_end=False, evaluation_every_steps=0)
    durations = evidence.run.with_workload(workload).durations(seed)
    return SimDriver(workload, bare, Pool(1, _standalone_nodes(config)), durations).run().hours


def _standalone_nodes(config: SchedulerConfig) -> int:
    return round(config.slots_per_standalone / config.slots_per_cell) if config.num_standalone else 0


def _distinct(configs: Iterable[SchedulerConfig]) -> list[SchedulerConfig]:
    return list({msgspec.msgpack.encode(config): config for config in configs}.values())
