"""Runs of settings over seeds, side by side on several processes, and what a user reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from qwengyre.sim.bounds import bounds, least_cost
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.idle import Spent
from qwengyre.sim.meters import Timeline
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.tuning import retuner
from qwengyre.sim.workload import Workload

T = TypeVar("T")


class DurationSource(Protocol):
    """Where a run's durations come from: a workload's distribution, or a real run's journal."""

    @property
    def workload(self) -> Workload: ...

    def durations(self, seed: int) -> Durations: ...


class Drawn(msgspec.Struct, frozen=True):
    """Durations drawn from the workload's own distribution."""

    workload: Workload

    def durations(self, seed: int) -> Durations:
        return Durations.draw(self.workload, seed)


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulated run showed: all that a search needs."""

    hours: float
    spent: Spent
    staleness_mean: float
    staleness_max: int
    staleness_token: float
    dropped: int
    moves: int
    idle_rollout: float
    idle_training: float
    switching: float
    timeline: Timeline | None = None


class SeedResult(SimulatedRun, frozen=True, kw_only=True):
    """One simulated run beside its bounds."""

    bound_work: float
    bound_path: float
    bound_joint: float
    gap_parts: dict[str, float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One setting over all seeds: means, and the range of the hours. Staleness in steps."""

    policy: str
    settings: Setting
    hours: float
    hours_min: float
    hours_max: float
    ratio_to_elastic: float | None
    bound_work: float
    bound_path: float
    bound_joint: float
    """No run with this mu, phi and cap on staleness is faster; the other two are never above it."""
    gap_parts: dict[str, float]
    """Hours of the whole pool by cause (`sim/idle.py`); they add up to `hours` minus `bound_work`."""
    staleness_mean: float
    staleness_max: int
    """Over all seeds."""
    dropped: float
    staleness_token: float
    """Mean over tokens of steps done when trained on minus the version that made the token."""
    moves: float
    idle_rollout: float
    """Share of the offered slots that served nobody."""
    idle_training: float
    """Share of the training role's time without forward or backward."""
    switching: float
    """Share of the cells' time between roles."""

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it."""
        return self.hours / self.bound_joint - 1


class SimulationJob(msgspec.Struct, frozen=True):
    source: DurationSource
    setting: Setting
    seed: int
    is_recorded: bool = False


def run_job(job: SimulationJob) -> SeedResult:
    """Simulate one setting with one seed, and bound it. Raises ValueError if the setting does not fit the workload."""
    return bound_job(job, simulate_job(job))


def simulate_job(job: SimulationJob) -> SimulatedRun:
    """Raises ValueError if the setting does not fit the workload."""
    workload = job.source.workload
    config, pool = build(workload, job.setting)
    durations = job.source.durations(job.seed)
    retune = retuner() if config.tune else None
    meters = SimDriver(workload, config, pool, durations, is_recorded=job.is_recorded, retune=retune).run()
    return SimulatedRun(
        hours=meters.hours,
        spent=meters.idle.spent(),
        staleness_mean=meters.staleness_mean,
        staleness_max=meters.staleness_max,
        staleness_token=meters.staleness_token,
        dropped=meters.num_dropped,
        moves=meters.num_moves,
        idle_rollout=meters.idle_rollout,
        idle_training=meters.idle_training,
        switching=meters.switching,
        timeline=meters.timeline() if job.is_recorded else None,
    )


def bound_job(job: SimulationJob, run: SimulatedRun) -> SeedResult:
    """Put the run of a job beside its bounds."""
    workload = job.source.workload
    config, pool = build(workload, job.setting)
    durations = job.source.durations(job.seed)
    bound = bounds(workload, config, pool, durations)
    return SeedResult(
        **msgspec.structs.asdict(run),
        bound_work=bound.work,
        bound_path=bound.path,
        bound_joint=bound.joint,
        gap_parts=run.spent.parts(workload.nodes, least_cost(workload, config, pool, durations)),
    )


class Inline(Executor):
    """An executor that works in the calling process, for one job at a time."""

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        return map(fn, *iterables)


@contextmanager
def workers(num: int) -> Iterator[Executor]:
    """`num` processes to simulate on; one means this process."""
    if num <= 1:
        yield Inline()
        return
    with ProcessPoolExecutor(num) as pool:
        yield pool


def simulate(source: DurationSource, settings: Sequence[Setting], seeds: Sequence[int], pool: Executor) -> list[Result]:
    """Simulate every setting with every seed, all of them at once on `pool`; keep the order of `settings`."""
    jobs = [SimulationJob(source, setting, seed) for setting in settings for seed in seeds]
    runs = list(pool.map(run_job, jobs, chunksize=max(1, min(8, len(seeds)))))
    num = len(seeds)
    return [summarize(setting, runs[i * num : (i + 1) * num]) for i, setting in enumerate(settings)]


def fastest(source: DurationSource, settings: Sequence[Setting], seeds: Sequence[int], pool: Executor) -> Result:
    """The setting with the least mean time over the seeds, the first of equals. No other is bounded."""
    jobs = [SimulationJob(source, setting, seed) for setting in settings for seed in seeds]
    num = len(seeds)
    runs = list(pool.map(simulate_job, jobs, chunksize=max(1, min(8, num))))
    first = min(range(0, len(jobs), num), key=lambda i: _mean(run.hours for run in runs[i : i + num]))
    chosen = slice(first, first + num)
    return summarize(jobs[first].setting, list(pool.map(bound_job, jobs[chosen], runs[chosen])))


def summarize(setting: Setting, runs: Sequence[SeedResult]) -> Result:
    hours = [run.hours for run in runs]
    return Result(
        policy=setting.policy,
        settings=setting,
        hours=_mean(hours),
        hours_min=min(hours),
        hours_max=max(hours),
        ratio_to_elastic=None,
        bound_work=_mean(run.bound_work for run in runs),
        bound_path=_mean(run.bound_path for run in runs),
        bound_joint=_mean(run.bound_joint for run in runs),
        gap_parts={name: _mean(run.gap_parts[name] for run in runs) for name in runs[0].gap_parts},
        staleness_mean=_mean(run.staleness_mean for run in runs),
        staleness_max=max(run.staleness_max for run in runs),
        dropped=_mean(run.dropped for run in runs),
        staleness_token=_mean(run.staleness_token for run in runs),
        moves=_mean(run.moves for run in runs),
        idle_rollout=_mean(run.idle_rollout for run in runs),
        idle_training=_mean(run.idle_training for run in runs),
        switching=_mean(run.switching for run in runs),
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
