"""What the report draws, taken out of the records of a run: scores, role spans, the waterlevel, numbers by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from qwengyre.journal import is_in_use
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import read_metrics
from qwengyre.telemetry.records import (
    AuditFinished,
    CellRole,
    CountsSampled,
    EvaluationFinished,
    MetricRecord,
    PlanAdopted,
    RatesSampled,
    RolesChanged,
    RunBegan,
    RunEnded,
    StepFinished,
    WaterlevelSampled,
)
from qwengyre.telemetry.summary import Summary, read_summary


class RoleSpan(msgspec.Struct, frozen=True):
    """One cell in one role from `start` to `end`, seconds on the run's clock."""

    cell: int
    role: CellRole
    start: float
    end: float


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One run, ready to be drawn. A step or version that was done again after a kill appears once, as last done."""

    label: str
    began: tuple[RunBegan, ...]
    """The start and every resume."""
    end_s: float
    spans: tuple[RoleSpan, ...]
    levels: tuple[WaterlevelSampled, ...]
    rates: tuple[RatesSampled, ...]
    plans: tuple[PlanAdopted, ...]
    """Of `scheduler.tune`, in order."""
    steps: tuple[StepFinished, ...]
    evaluations: tuple[EvaluationFinished, ...]
    ended: RunEnded | None
    is_running: bool
    """Whether a controller is writing to the run just now."""
    summary: Summary

    @property
    def policy(self) -> str:
        return self.began[0].policy if self.began else ""


def alike(runs: Sequence[RunSeries]) -> dict[str, list[RunSeries]]:
    """Runs that differ by nothing but their seed, under a label of what tells them from the others; of no others is a mean worth a thing.

    That is known by the name in the run file, the policy, the number of cells and the number of steps.
    """
    facts = [_facts(run) for run in runs]
    shared = set(facts[0]).intersection(*facts) if facts else set()
    groups: dict[str, list[RunSeries]] = {}
    for run, told in zip(runs, facts, strict=True):
        own = [fact for fact in told if fact not in shared]
        groups.setdefault(", ".join(own) or run.policy or run.label, []).append(run)
    return groups


def _facts(run: RunSeries) -> tuple[str, ...]:
    began = run.began[0] if run.began else None
    return (began.name, run.policy, f"{began.num_cells} cells", f"{began.num_steps} steps") if began else (run.label,)


def run_series(folder: RunFolder) -> RunSeries:
    """Read a run folder. A run that has only just begun gives empty series."""
    is_running = folder.controller_journal.exists() and is_in_use(folder.controller_journal)
    summary = read_summary(folder.summary) or Summary()
    return series_of(read_metrics(folder.metrics), summary, label=folder.path.resolve().name, is_running=is_running)


def series_of(records: Iterable[MetricRecord], summary: Summary, *, label: str, is_running: bool = False) -> RunSeries:
    """As `run_series`, from records."""
    kept: dict[type, list[Any]] = {kind: [] for kind in (RunBegan, RolesChanged, WaterlevelSampled, RatesSampled, PlanAdopted)}
    steps: dict[int, StepFinished] = {}
    evaluations: dict[int, EvaluationFinished] = {}
    ended, end_s = None, 0.0
    for record in records:
        end_s = max(end_s, record.at)
        match record:
            case StepFinished():
                steps[record.step] = record
            case EvaluationFinished():
                evaluations[record.version] = record
            case CountsSampled() | AuditFinished():
                pass  # the summary has them
            case RunEnded():
                ended = record
            case _:
                ended = None if isinstance(record, RunBegan) else ended  # a resume continues after an end
                kept[type(record)].append(record)
    return RunSeries(
        label=label,
        began=tuple(kept[RunBegan]),
        end_s=end_s,
        spans=tuple(role_spans(kept[RolesChanged], end_s)),
        levels=tuple(kept[WaterlevelSampled]),
        rates=tuple(kept[RatesSampled]),
        plans=tuple(kept[PlanAdopted]),
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[version] for version in sorted(evaluations)),
        ended=ended,
        is_running=is_running,
        summary=summary,
    )


def role_spans(changes: Sequence[RolesChanged], end_s: float) -> list[RoleSpan]:
    """Spans by cell and time; the last of each cell lasts to the end. Neighbours of one role are one span.

    >>> role_spans([RolesChanged(0.0, 1, "rollout"), RolesChanged(2.0, 1, "lost")], 5.0)[1]
    RoleSpan(cell=1, role='lost', start=2.0, end=5.0)
    """
    spans = []
    for cell in sorted({change.cell for change in changes}):
        own = [change for change in changes if change.cell == cell]
        starts = [
            change for before, change in zip([None, *own], own, strict=False) if before is None or before.role != change.role
        ]
        ends = [change.at for change in starts[1:]] + [end_s]
        spans += [RoleSpan(cell=cell, role=start.role, start=start.at, end=end) for start, end in zip(starts, ends, strict=True)]
    return spans


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` points of a step function, by time buckets: the largest value and the last of each bucket.

    >>> thin([(0.0, 1.0), (0.1, 9.0), (0.2, 2.0), (1.0, 3.0)], 2)
    [(0.1, 9.0), (0.2, 2.0), (1.0, 3.0)]
    """
    if len(points) <= most:
        return list(points)
    start, width = points[0][0], (points[-1][0] - points[0][0]) / most or 1.0
    kept: list[tuple[float, float]] = []
    bucket: list[tuple[float, float]] = []
    number = 0
    for point in points:
        if int((point[0] - start) / width) != number and bucket:
            kept += _extremes(bucket)
            bucket = []
        number = int((point[0] - start) / width)
        bucket.append(point)
    return kept + _extremes(bucket)


def _extremes(bucket: list[tuple[float, float]]) -> list[tuple[float, float]]:
    highest = max(bucket, key=lambda point: point[1])
    return [highest] if highest == bucket[-1] else [highest, bucket[-1]]
