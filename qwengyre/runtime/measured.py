"""A real run as the source of a simulation: what its journals say executions, calls, steps and switches took.

Seed 0 simulates the run as it was, group by group; every other seed draws groups from it with replacement.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError, JournalError
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided, RunOpened
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.history import MIN_EXECUTION_S, MIN_MICRO_STEP_S, History, MeasuredGroup, MeasuredRun
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.records import GatewayRecord


class _Calls:
    """What is gathered in one pass over the journals of the gateways."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], float] = {}
        self.in_calls_s = 0.0
        self.held_by_moves_s = 0.0

    def read(self, paths: Iterable[Path]) -> None:
        for attempt in recorded_attempts(record for path in paths for _, record in read(path, GatewayRecord)):
            who = attempt.opened.execution, attempt.opened.attempt
            for call in attempt:
                if (finished := call.finished) is not None:
                    self.held[who] = self.held.get(who, 0.0) + finished.held_s
                    self.in_calls_s += max(0.0, finished.at - call.started.at - finished.held_s)
                    if finished.num_moves:
                        self.held_by_moves_s += finished.held_s


NOTHING_YET: Final = "no rollout group of this run was trained on yet: let it go on, then try again"


def measured_source(folder: RunFolder) -> MeasuredRun:
    """Read a run's journals. Raises ConfigError if no group of it was trained on yet."""
    config = RecordedConfig(folder.config).table("scheduler", SchedulerConfig)
    calls = _Calls()
    if not folder.has_begun and not folder.gateway_journal.exists():
        raise ConfigError(NOTHING_YET, file=str(folder.path))
    try:
        history, config = _read(folder.controller_journal, config)
        calls.read(journal for journal in folder.gateway_journals if journal.exists())
    except JournalError as error:
        raise ConfigError(f"the journal cannot be read: {error}", file=str(folder.path)) from error
    groups = tuple(_groups(history, calls))
    if not groups:
        raise ConfigError(NOTHING_YET, file=str(folder.path))
    workload = history.workload(
        config,
        groups,
        move_stall_s=calls.held_by_moves_s / history.num_moves if history.num_moves else 0.0,
        decode_share=min(1.0, calls.in_calls_s / sum(seconds for group in groups for seconds in group.durations_s)),
    )
    return MeasuredRun(workload, groups)


def _read(path: Path, config: SchedulerConfig) -> tuple[History, SchedulerConfig]:
    """What happened, and what the run was to do in the end."""
    history, at = History(), 0.0
    for _, record in read(path, ControllerRecord):
        match record:
            case RunOpened():
                history.begin_life()
            case ev.Event():
                at = record.at
                history.happened(record)
                if isinstance(record, ev.Reconfigured):
                    config = msgspec.structs.replace(config, **record.changes())
            case Decided():
                for command in record.commands:
                    history.decided(command, at)
    return history, config


def _groups(history: History, calls: _Calls) -> Iterable[MeasuredGroup]:
    """Trained groups in the order of dispatch; durations without the time that calls were held."""
    for group, micro_steps in history.trained_groups():
        lived = [(name, *history.lived[name]) for name in sorted(history.members[group]) if name in history.lived]
        yield MeasuredGroup(
            tuple(max(MIN_EXECUTION_S, seconds - calls.held.get((name, attempt), 0.0)) for name, attempt, seconds in lived),
            tuple(max(MIN_MICRO_STEP_S, history.computed[name]) for name in micro_steps),
        )
