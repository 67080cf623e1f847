"""From a journal to the state that a resumed run goes on from."""

from __future__ import annotations

from pathlib import Path

import msgspec

from qwengyre.core.errors import ConfigError, JournalCorrupt
from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided, ExecutionDone, GroupJudged, RunOpened, TaskChosen
from qwengyre.runtime.tally import Tally
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.commands import AnyCommand, Dispatch, TakeGroup
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.history import History
from qwengyre.trajectory.process import Judgement


class Recovered:
    """What the journal says. `scheduler` stands where the last life stopped."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.configured = config
        """With every `Reconfigured`, and without plans of the run's own."""
        self.lives = 0
        self.changes: tuple[str, ...] = ()
        """What is journalled of the command line when this life opens."""
        self.at = 0.0
        self.tally = Tally()
        self.history = History()
        self.has_started = False
        self.dispatches: list[Dispatch] = []
        self.done: dict[ExecutionId, ExecutionDone] = {}
        self.chosen: dict[GroupId, TaskChosen] = {}
        """What a task source said."""
        self.judged: dict[GroupId, Judgement] = {}
        """What hooks said of groups."""
        self.taken: dict[GroupId, int] = {}
        """Step that took a group, the last one that did."""

    def changes_to(self, config: SchedulerConfig) -> dict[str, int | float | bool]:
        """What a `Reconfigured` has to say for the run to go on with `config`. Raises ConfigError for what it cannot."""
        changes = {
            name: getattr(config, name) for name in ev.CHANGEABLE if getattr(config, name) != getattr(self.configured, name)
        }
        if changes and (reason := self.scheduler.cannot_change(changes)):
            raise ConfigError(f"this run cannot continue like this: {reason}", key=" and ".join(key_of(name) for name in changes))
        return changes

    def events_of_the_stop(self) -> list[ev.Event]:
        """What a kill of everything means to the scheduler: all cells lost; live executions lost, or over if that is journalled."""
        state = self.scheduler.state
        lost: list[ev.Event] = [
            ev.CellLost(at=self.at, cell=cell.cell) for cell in state.cells.all if cell.state is not CellState.LOST
        ]
        lost += [ev.StandaloneLost(at=self.at, index=index) for index, alive in enumerate(state.standalone_alive) if alive]
        for live in state.placement.live.values():
            if live.server is None and live.execution not in state.placement.held:
                continue
            done = self.done.get(live.execution)
            kind = ev.ExecutionEnded if done and done.attempt == live.attempt else ev.ExecutionLost
            lost.append(kind(at=self.at, execution=live.execution, attempt=live.attempt))
        return lost


def key_of(name: str) -> str:
    """The key of a run file that a field of `SchedulerConfig` is set by.

    >>> key_of("steps"), key_of("evaluate_at_end")
    ('scheduler.steps', 'evaluation.at_end')
    """
    is_evaluation = name.startswith(("evaluate_", "evaluation_"))
    return f"evaluation.{name.split('_', 1)[1]}" if is_evaluation else f"scheduler.{name}"


def changes_of(path: Path) -> tuple[str, ...]:
    """`--set` of all resumes so far. Raises JournalCorrupt."""
    changes: tuple[str, ...] = ()
    for _, record in read(path, ControllerRecord) if path.exists() else ():
        if isinstance(record, RunOpened):
            changes = record.changes
    return changes


def recover(path: Path, config: SchedulerConfig) -> Recovered:
    """Replay the controller's journal. Raises JournalCorrupt if the scheduler decides anything else than it did then."""
    recovered = Recovered(config)
    commands: list[AnyCommand] = []
    for position, record in read(path, ControllerRecord):
        match record:
            case RunOpened():
                recovered.lives += 1
                recovered.history.begin_life()
                recovered.at = max(recovered.at, record.at)
            case ExecutionDone():
                recovered.done[record.execution] = record
            case TaskChosen():
                recovered.chosen[record.group] = record
            case GroupJudged():
                recovered.judged[record.group] = record.judgement
            case Decided():
                _check(path, position, commands, record)
            case ev.Event():
                commands = recovered.scheduler.handle(record)
                recovered.tally.see(record, commands, recovered.scheduler.state.steps_done)
                recovered.history.see(record, commands)
                _note(recovered, commands)
                recovered.at = record.at
                recovered.has_started = True
                if isinstance(record, ev.Reconfigured):
                    recovered.configured = msgspec.structs.replace(recovered.configured, **record.changes())
    return recovered


def _check(path: Path, position: int, commands: list[AnyCommand], decided: Decided) -> None:
    if msgspec.msgpack.encode(Decided(tuple(commands))) != msgspec.msgpack.encode(decided):
        raise JournalCorrupt(
            str(path),
            offset=position,
            reason="the scheduler decides differently than when this was written: resume with the version and config of the run",
        )


def _note(recovered: Recovered, commands: list[AnyCommand]) -> None:
    """What was decided counts, whether or not the kill left time to journal the decision."""
    for command in commands:
        match command:
            case Dispatch():
                recovered.dispatches.append(command)
            case TakeGroup():
                recovered.taken[command.group] = command.step
