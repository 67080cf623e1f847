"""`qwengyre bench tuning`: simulated runs that begin badly and plan again by themselves, against the best plan from the start."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Annotated, Final

import msgspec
import typer

from qwengyre.bench.output import say
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.planner import plan
from qwengyre.sim.results import Drawn, DurationSource, simulate, workers
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.workload import Workload, builtin_workloads, load_workload

FAR: Final = (8, 2.0)
"""mu, phi of a start that is far too deep for the built-in workloads. It needs a cap of its own: phi + mu - 1."""

replace = msgspec.structs.replace


class TunedRun(msgspec.Struct, frozen=True):
    """One bad start. Hours are means over the seeds, staleness is in steps."""

    workload: str
    max_staleness: int
    steps_per_burst: int
    dispatch_depth: float
    untuned: float
    tuned: float
    told: float
    """Of runs that begin the same and are told the best plan after their first step: nothing that measures can do better by much."""
    best: float
    """The best that `plan` finds on the same seeds under the same cap."""
    staleness_max: int
    """Of the tuned runs."""

    @property
    def above(self) -> float:
        """Share by which the tuned run is longer than the best plan."""
        return self.tuned / self.best - 1


def tuning(
    workload: Annotated[list[str] | None, typer.Option(help="A workload; give it again for more. Default: all built-in.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to simulate on.")] = 1,
    json: JsonTarget = None,
) -> None:
    """Simulate tuned runs from bad starts on each workload, a task's earlier group being known, and print them beside the best plan.

    Starts: a publish after each step with nothing ahead; the longest burst that the cap allows; 8 steps and 2 ahead under a cap
    of 9. The cap of the first two is the staleness that the workload's own setting shows.
    """
    found: list[TunedRun] = []
    say("| workload | cap | start: mu, phi | as it began | tuned | told after a step | best plan | tuned above best |")
    say("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with workers(jobs) as pool:
        for spec in workload or builtin_workloads():
            name, loaded = load_workload(spec)
            for run in tuned_runs(name, Drawn(foreseen(loaded)), range(seeds), pool):
                say(row(run))
                found.append(run)
    if json is not None:
        write_json(json, [msgspec.to_builtins(run) for run in found])


def foreseen(workload: Workload) -> Workload:
    """With what one earlier group of each task says of the next."""
    return replace(workload, foresight_error=workload.sigma_execution / workload.executions_per_group**0.5)


def tuned_runs(name: str, source: DurationSource, seeds: Sequence[int], pool: Executor) -> list[TunedRun]:
    """Every bad start of one workload."""
    own = simulate(source, [Setting()], seeds, pool)[0].staleness_max
    far = int(FAR[0] + FAR[1]) - 1
    return [
        *_under(name, source, seeds, pool, own, [(1, 0.0), (own + 1, 0.0)]),
        *_under(name, source, seeds, pool, far, [FAR]),
    ]


def _under(
    name: str, source: DurationSource, seeds: Sequence[int], pool: Executor, cap: int, starts: Sequence[tuple[int, float]]
) -> list[TunedRun]:
    best = plan(source, seeds, pool, max_staleness=cap).best[0]
    found = []
    for mu, phi in starts:
        bad = Setting(steps_per_burst=mu, dispatch_depth=phi, max_staleness=cap)
        untuned, tuned = simulate(source, [bad, replace(bad, tune=True)], seeds, pool)
        told = sum(_told_hours(source, bad, best.settings, seed) for seed in seeds) / len(seeds)
        found.append(
            TunedRun(
                name, cap, mu, phi, untuned.hours, tuned.hours, told, best.hours,
                tuned.staleness_max,
            )
        )  # fmt: skip
    return found


def _told_hours(source: DurationSource, bad: Setting, best: Setting, seed: int) -> float:
    """A run that adopts `best` from the publish that follows its first step on."""
    config, pool = build(source.workload, replace(bad, tune=True))
    told, _ = build(source.workload, best)

    def tell(scheduler: Scheduler, event: ev.Event, commands: Sequence[cmd.Command]) -> ev.Retuned | None:
        if not isinstance(event, ev.StepDone) or scheduler.state.steps_done != 1:
            return None
        return ev.Retuned(
            event.at, told.steps_per_burst, told.dispatch_depth, told.two_way, told.backlog, "the best plan", told.order
        )

    return SimDriver(source.workload, config, pool, source.durations(seed), retune=tell).run().hours


def row(run: TunedRun) -> str:
    """Of the table in Markdown."""
    return (
        f"| {run.workload} | {run.max_staleness} | {run.steps_per_burst}, {run.dispatch_depth:g} | {run.untuned:.1f} h | {run.tuned:.1f} h | {run.told:.1f} h "
        f"| {run.best:.1f} h | {100 * run.above:+.1f} % |"
    )
