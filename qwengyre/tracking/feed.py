"""What trackers are sent, out of the run folder: the newest records, tables and costs since the last look. Only reads.

The folder is the queue: nothing is dropped because a tracker is slow, away or dead, and what was sent is kept beside the run, so that the
next life of the tracker goes on from there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.ids import ExecutionId
from qwengyre.dashboard.costs import RunCosts
from qwengyre.dashboard.executions import ExecutionEntry
from qwengyre.dashboard.open_run import OpenRun, open_run_costs
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import MetricsTail
from qwengyre.telemetry.records import FINISHED, MetricRecord, RunBegan, RunEnded, StepFinished, scalars
from qwengyre.telemetry.summary import Summary, read_summary
from qwengyre.telemetry.tracking_config import TrackingConfig
from qwengyre.tracking.api import Cell, Point, RunToTrack, SentTable
from qwengyre.trainer.checkpoint import checkpoints

COLUMNS: Final = ("execution", "task", "reward", "end", "version", "calls", "tokens", "seconds", "detail")
MAX_SAMPLE_CHARS: Final = 20_000
"""Of one conversation: what a person reads of it in a table. The dashboard has the whole."""
READ_S: Final = 5.0
"""Longest look for a conversation in the gateway's journal, at a time."""
SECRET_TABLE: Final = "harness.env."
"""Names of variables are sent, their values never: keys of services stand there."""


class Feed:
    """One run folder, read on."""

    def __init__(self, folder: RunFolder, config: TrackingConfig) -> None:
        self._folder, self._config = folder, config
        self._run = OpenRun(folder)
        self._metrics = MetricsTail(folder.metrics)

    def run(self, tracker: str) -> RunToTrack:
        """What `tracker` is opened with. Its folder is made."""
        own = self._folder.path / "tracking" / tracker
        own.mkdir(parents=True, exist_ok=True)
        config = flat(tomllib.loads(self._folder.config.read_text(encoding="utf-8")))
        return RunToTrack(self._run.name, self._config.project, str(own), config, self._config.mlflow_uri)

    def refresh(self) -> None:
        """Read what came since. Raises JournalError."""
        self._metrics.refresh()
        with self._run.lock:
            self._run.table.refresh()

    @property
    def num_records(self) -> int:
        return len(self._metrics.records)

    def points(self, first: int) -> list[Point]:
        """Of all records from number `first` on."""
        return [point for record in self._metrics.records[first:] if (point := point_of(record)) is not None]

    def steps(self, first: int) -> list[int]:
        """Steps that finished in the records from number `first` on, each once."""
        return list(dict.fromkeys(record.step for record in self._metrics.records[first:] if isinstance(record, StepFinished)))

    def costs(self, step: int) -> Point:
        """What the run cost so far."""
        run = self._run
        return Point(step, True, cost_values(open_run_costs(run)))

    def executions(self, step: int) -> SentTable:
        """Those that `step` trained on."""
        groups = [group.group for group in self._run.table.groups.values() if group.step == step]
        entries = [entry for group in groups for entry in self._run.table.members(group)]
        columns = (*COLUMNS, "conversation") if self._config.samples else COLUMNS
        rows = []
        for index, entry in enumerate(entries):
            said = (self.conversation(entry) if index < self._config.samples else None,) if self._config.samples else ()
            rows.append((*row_of(entry), *said))
        return SentTable("executions", step, columns, tuple(rows))

    def conversation(self, entry: ExecutionEntry) -> str | None:
        """The longest path of an execution as text; None where it cannot be read."""
        recorded = self._run.attempt(ExecutionId(entry.execution), entry.attempt, READ_S)
        reader = self._run.reader
        if recorded is None or reader is None:
            return None
        tree = recorded.tree
        longest = max(
            (tree.path_of(call) for call in tree.calls), key=lambda path: sum(part.num_tokens for part in path), default=()
        )
        text = reader.decode(tree.token_ids_T(longest).tolist())
        return text if len(text) <= MAX_SAMPLE_CHARS else f"{text[:MAX_SAMPLE_CHARS]} ... ({len(text):,} characters)"

    def summary(self) -> dict[str, Cell]:
        return summary_values(read_summary(self._folder.summary) or Summary())

    def checkpoints(self, after: int) -> dict[int, Path]:
        """Checkpoints of more than `after` steps, by steps done."""
        return {step: folder for step, folder in sorted(checkpoints(self._folder.checkpoints).items()) if step > after}

    @property
    def ended(self) -> RunEnded | None:
        """How the run ended; None while it goes on, and after a resume."""
        bounds = [record for record in self._metrics.records if isinstance(record, (RunBegan, RunEnded))]
        return bounds[-1] if bounds and isinstance(bounds[-1], RunEnded) else None

    @property
    def is_finished(self) -> bool:
        return (ended := self.ended) is not None and ended.reason == FINISHED


def point_of(record: MetricRecord) -> Point | None:
    """
    >>> from qwengyre.telemetry.records import EvaluationFinished
    >>> point_of(EvaluationFinished(at=3.0, version=4, score=0.5, greedy=0.6, num_tasks=20, num_executions=80)).step
    4
    """
    step, values = scalars(record)
    return Point(int(record.at) if step is None else step, step is not None, values) if values else None


def row_of(entry: ExecutionEntry) -> tuple[Cell, ...]:
    seconds = None if entry.seconds is None else round(entry.seconds, 3)
    counts = entry.version, entry.num_calls, entry.num_tokens
    return entry.execution, entry.task, entry.reward, entry.end, *counts, seconds, entry.detail.partition("\n")[0]


def cost_values(costs: RunCosts) -> dict[str, float]:
    """Hours by role and by cause of idle time, and tokens, as curves.

    >>> cost_values(RunCosts(device_h={"changing role": 0.5}, devices_per_cell=1, tokens_generated=3, tokens_by_fate={}, sandbox_h=0.0,
    ...     idle_h={}))["costs/device_h/changing_role"]
    0.5
    """
    values = {f"costs/device_h/{role.replace(' ', '_')}": hours for role, hours in costs.device_h.items()}
    for cause, hours in costs.idle_h.items():
        name = "_".join("".join(letter if letter.isalnum() else " " for letter in cause).split())
        values[f"costs/idle_h/{name}"] = hours
    values["costs/sandbox_h"] = costs.sandbox_h
    values["costs/tokens_generated"] = float(costs.tokens_generated)
    values["costs/tokens_thrown_away"] = float(costs.tokens_thrown_away)
    return values


def summary_values(summary: Summary) -> dict[str, Cell]:
    return {f"summary/{name}": value for name, value in msgspec.structs.asdict(summary).items()}


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, str | int | float | bool | None]:
    """Tables as one, by `table.key`; lists as text.

    >>> flat({"harness": {"command": ["a", "b"], "env": {"API_KEY": "secret"}}})
    {'harness.command': "['a', 'b']", 'harness.env.API_KEY': '(set)'}
    """
    found: dict[str, str | int | float | bool | None] = {}
    for key, value in _entries(table, prefix):
        is_plain = value is None or isinstance(value, (str, int, float, bool))
        found[key] = "(set)" if key.startswith(SECRET_TABLE) else value if is_plain else str(value)
    return found


def _entries(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
