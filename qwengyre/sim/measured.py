"""A real run as the source of a simulation: what its journals say executions, calls, steps and switches took.

Seed 0 simulates the run as it was, group by group; every other seed draws groups from it with replacement.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError, JournalError
from qwengyre.core.ids import group_of
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided, RunOpened
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.durations import Durations, MeasuredDurations
from qwengyre.sim.workload import Workload
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.records import GatewayRecord

ANSWERED = (cmd.Drain, cmd.SwitchToTraining, cmd.ReturnToRollout, cmd.OpenStep, cmd.CloseStep, cmd.RunOptimizer, cmd.Publish)


class MeasuredGroup(msgspec.Struct, frozen=True):
    """A group that a step consumed."""

    durations_s: tuple[float, ...]
    """Of its executions, without the time that their calls were held."""
    micro_steps_s: tuple[float, ...]


class MeasuredRun(msgspec.Struct, frozen=True):
    """Durations of one real run, on the workload that it was."""

    workload: Workload
    groups: tuple[MeasuredGroup, ...]

    def with_workload(self, workload: Workload) -> MeasuredRun:
        return MeasuredRun(workload, self.groups)

    def durations(self, seed: int) -> Durations:
        num = self.workload.num_groups
        in_order = np.arange(num) % len(self.groups)
        index_G = in_order if seed == 0 else np.random.default_rng(seed).integers(len(self.groups), size=num)
        chosen = [self.groups[index] for index in index_G]
        N = self.workload.executions_per_group
        unloaded_GN = np.array([[group.durations_s[i % len(group.durations_s)] for i in range(N)] for group in chosen])
        return MeasuredDurations(unloaded_GN, [group.micro_steps_s for group in chosen])


class _Journal:
    """What is gathered in one pass over the controller's journal."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self.started: dict[tuple[str, int], float] = {}
        self.lived: dict[str, tuple[int, float]] = {}
        """Attempt and seconds of each execution that ended."""
        self.groups: dict[int, list[str]] = {}
        self.micro_steps: dict[int, tuple[str, ...]] = {}
        self.computed: dict[str, float] = {}
        self.waits: dict[type, list[float]] = {kind: [] for kind in ANSWERED}
        self.num_moves = 0
        self._pending: dict[int, tuple[cmd.Ticketed, float]] = {}

    def read(self, path: Path) -> None:
        at = 0.0
        for _, record in read(path, ControllerRecord):
            match record:
                case RunOpened():
                    self._pending.clear()
                case ev.Event():
                    at = record.at
                    self._happened(record)
                case Decided():
                    for command in record.commands:
                        self._decided(command, at)

    def _decided(self, command: cmd.Command, at: float) -> None:
        match command:
            case cmd.Dispatch(group, kind):
                self.kinds[group] = kind
            case cmd.Start(execution, attempt):
                self.started[execution, attempt] = at
            case cmd.Drain():
                self.num_moves += len(command.moves)
        if isinstance(command, cmd.Ticketed):
            self._pending[command.ticket] = command, at

    def _happened(self, event: ev.Event) -> None:
        match event:
            case ev.ExecutionEnded(at, execution, attempt):
                if (start := self.started.get((execution, attempt))) is not None:
                    self.lived[execution] = attempt, at - start
                    self.groups.setdefault(group_of(execution), []).append(execution)
            case ev.GroupReady():
                self.micro_steps[event.group] = event.micro_steps
        if not isinstance(event, ev.TicketedAnswer) or event.ticket not in self._pending:
            return
        command, asked = self._pending.pop(event.ticket)
        if isinstance(command, cmd.Compute):
            self.computed[command.micro_step] = event.at - asked
        elif type(command) in self.waits:
            self.waits[type(command)].append(event.at - asked)

    def mean_wait(self, *kinds: type) -> float:
        return sum(_mean(self.waits[kind]) for kind in kinds)


class _Calls:
    """What is gathered in one pass over the gateway's journal."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], float] = {}
        self.in_calls_s = 0.0
        self.held_by_moves_s = 0.0

    def read(self, path: Path) -> None:
        for attempt in recorded_attempts(record for _, record in read(path, GatewayRecord)):
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
    journal, calls = _Journal(), _Calls()
    if not folder.has_begun and not folder.gateway_journal.exists():
        raise ConfigError(NOTHING_YET, file=str(folder.path))
    try:
        journal.read(folder.controller_journal)
        if folder.gateway_journal.exists():
            calls.read(folder.gateway_journal)
    except JournalError as error:
        raise ConfigError(f"the journal cannot be read: {error}", file=str(folder.path)) from error
    groups = tuple(_groups(journal, calls))
    if not groups:
        raise ConfigError(NOTHING_YET, file=str(folder.path))
    return MeasuredRun(_workload(config, journal, calls, groups), groups)


def _groups(journal: _Journal, calls: _Calls) -> Iterable[MeasuredGroup]:
    """Trained groups in the order of dispatch."""
    for group, micro_steps in sorted(journal.micro_steps.items()):
        executions = sorted(journal.groups.get(group, []))
        if journal.kinds.get(group) != "train" or not executions or any(name not in journal.computed for name in micro_steps):
            continue
        lived = [(name, *journal.lived[name]) for name in executions]
        durations = tuple(max(1e-3, seconds - calls.held.get((name, attempt), 0.0)) for name, attempt, seconds in lived)
        yield MeasuredGroup(durations, tuple(max(1e-6, journal.computed[name]) for name in micro_steps))


def _workload(config: SchedulerConfig, journal: _Journal, calls: _Calls, groups: tuple[MeasuredGroup, ...]) -> Workload:
    """One node a cell: the run's cells are the only unit that it tells."""
    durations_s = np.array([seconds for group in groups for seconds in group.durations_s])
    micro_steps_G = [len(group.micro_steps_s) for group in groups]
    work_s = np.mean([sum(group.micro_steps_s) for group in groups]) * config.groups_per_step
    return Workload(
        steps=config.steps,
        groups_per_step=config.groups_per_step,
        executions_per_group=config.executions_per_group,
        steps_per_burst=config.steps_per_burst,
        dispatch_depth=config.dispatch_depth,
        nodes=config.num_cells,
        cell_nodes=1,
        slots_per_node=config.slots_per_cell,
        median_h=float(np.median(durations_s)) / 3600,
        sigma_query=float(np.std([np.mean(np.log(group.durations_s)) for group in groups])),
        sigma_execution=float(np.mean([np.std(np.log(group.durations_s)) for group in groups])),
        overall_timeout_h=float(durations_s.max()) / 3600 * 10,
        train_node_hours_per_step=float(work_s) / 3600,
        train_share_by_duration=0.0,
        micro_steps_per_group=max(1, round(float(np.mean(micro_steps_G)))),
        optimizer_s=journal.mean_wait(cmd.OpenStep, cmd.CloseStep, cmd.RunOptimizer),
        publish_s=journal.mean_wait(cmd.Publish),
        to_training_s=journal.mean_wait(cmd.Drain, cmd.SwitchToTraining),
        to_rollout_s=journal.mean_wait(cmd.ReturnToRollout),
        move_stall_s=calls.held_by_moves_s / journal.num_moves if journal.num_moves else 0.0,
        decode_share=min(1.0, calls.in_calls_s / float(durations_s.sum())),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
