"""What the two journals of a run say of its executions: the gateway's has the calls, the controller's the scores.

Also reads the journal of a stand-alone gateway, which has no scores. Only the calls of executions still open are held in memory.

The run may be going on. So the scores are read first, as they name nothing that the gateway has not journalled before, and whoever reads
the gateway's journal twice sees in the second reading what it saw in the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import ExecutionId, GroupId, group_of
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided, ExecutionDone
from qwengyre.scheduler.commands import Dispatch
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.records import GatewayRecord, Opened


class RunSources(msgspec.Struct, frozen=True):
    """Where the records of a run lie."""

    gateway_journal: Path
    controller_journal: Path | None
    """None for a gateway that ran alone."""
    config: Path | None

    def is_before_first_call(self, scores: Scores) -> bool:
        """Whether the run is still being started, or makes its policy first: nothing is lost then, there is nothing yet."""
        return self.controller_journal is not None and scores.is_empty and not self.gateway_journal.is_file()


class Scores(msgspec.Struct, frozen=True):
    """What the controller knows of the executions that ended."""

    done: dict[ExecutionId, ExecutionDone]
    """The last end of each."""
    dispatches: dict[GroupId, Dispatch]

    @property
    def is_empty(self) -> bool:
        return not (self.done or self.dispatches)

    def dispatch_of(self, execution: ExecutionId) -> Dispatch | None:
        """None for a gateway that ran alone, whose executions have any name, and for a run that has lost its scores."""
        return self.dispatches.get(group_of(execution)) if self.dispatches else None

    def knows(self, execution: ExecutionId) -> bool:
        return not self.dispatches or self.dispatch_of(execution) is not None


def open_run(path: Path) -> RunSources:
    """`path` is a run folder, a gateway's folder, or its journal. Raises ConfigError when it is none of them."""
    if path.is_file():
        if path.name in ("controller.log", "trained.log"):
            raise ConfigError("not the journal of a gateway: give the run folder, or its gateway.log", file=str(path))
        return RunSources(path, None, None)
    for journal in (path / "gateway.log", path / "journal" / "gateway.log"):
        if journal.is_file() and not (path / "config.toml").is_file():
            return RunSources(journal, None, None)
    folder = RunFolder.open(path)
    return RunSources(folder.gateway_journal, folder.controller_journal, folder.config)


def recorded_executions(journal: Path, only: ExecutionId | None = None, *, until: int | None = None) -> Iterator[CallLog]:
    """Every attempt, as soon as it is closed; those still open last. Nothing written after the position `until` is seen.

    Raises JournalError, and RecordError for records that contradict themselves.
    """
    records = (record for _, record in read(journal, GatewayRecord, until=until))
    return recorded_attempts(records, lambda opened: only is None or opened.execution == only)


def last_attempts(sources: RunSources, scores: Scores) -> Iterator[CallLog]:
    """The attempt of each execution that counts: the one that was scored, else the latest. Raises JournalError.

    Executions that were dispatched after `scores` were read are left out: a run that goes on is shown as it was at one moment.
    """
    if sources.is_before_first_call(scores):
        say("note: this run has not recorded a call yet", err=True)
        return
    latest: dict[ExecutionId, int] = {}
    end = 0
    for position, record in read(sources.gateway_journal, GatewayRecord):
        end = position
        if isinstance(record, Opened):
            latest[record.execution] = max(record.attempt, latest.get(record.execution, 0))
    for recorded in recorded_executions(sources.gateway_journal, until=end):
        execution = recorded.opened.execution
        counted = scores.done[execution].attempt if execution in scores.done else latest[execution]
        if recorded.opened.attempt == counted and scores.knows(execution):
            yield recorded


def read_scores(sources: RunSources) -> Scores:
    """Says so when a run has lost its scores: its calls are still worth reading."""
    journal = sources.controller_journal
    if journal is not None and not (journal.is_file() and journal.stat().st_size):
        if sources.gateway_journal.is_file():
            say(f"note: {journal} is missing or empty, and with it every score: rewards and advantages are blank", err=True)
        journal = None
    done: dict[ExecutionId, ExecutionDone] = {}
    dispatches: dict[GroupId, Dispatch] = {}
    for _, record in read(journal, ControllerRecord) if journal is not None else ():
        if isinstance(record, ExecutionDone):
            done[record.execution] = record
        elif isinstance(record, Decided):
            dispatches |= {command.group: command for command in record.commands if isinstance(command, Dispatch)}
    return Scores(done, dispatches)


def find_execution(sources: RunSources, scores: Scores, execution: str, attempt: int | None) -> CallLog:
    """One attempt of one execution, the latest unless `attempt` is given. Raises ConfigError, naming what there is."""
    journal = sources.gateway_journal
    is_early = sources.is_before_first_call(scores)
    found = recorded_executions(journal, ExecutionId(execution)) if not is_early else ()
    attempts = {recorded.opened.attempt: recorded for recorded in found}
    if not attempts:
        records = read(journal, GatewayRecord) if not is_early else ()
        names = sorted({record.execution for _, record in records if isinstance(record, Opened)})
        some = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        raise ConfigError(f"no execution {execution!r} was recorded; there are: {some or 'none yet'}", file=str(journal))
    wanted = max(attempts) if attempt is None else attempt
    if wanted not in attempts:
        raise ConfigError(f"{execution} has no attempt {wanted}; it has {sorted(attempts)}", file=str(journal))
    return attempts[wanted]
