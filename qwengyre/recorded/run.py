"""What the journals of a run say of its executions: those of its gateways have the calls, the controller's the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import ExecutionId, GroupId, group_of, index_of
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided, ExecutionDone, GroupJudged
from qwengyre.scheduler.commands import Dispatch
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.process import Judgement
from qwengyre.trajectory.records import GatewayRecord, Opened


class Scores(msgspec.Struct, frozen=True):
    """What the controller knows of the executions that ended."""

    done: dict[ExecutionId, ExecutionDone]
    """The last end of each."""
    dispatches: dict[GroupId, Dispatch]
    judged: dict[GroupId, Judgement] = {}
    """What hooks said of groups."""

    @property
    def is_empty(self) -> bool:
        return not (self.done or self.dispatches)

    def choice_of(self, done: ExecutionDone) -> tuple[int, ...] | None:
        """The paths that a hook chose of an execution; None where the built-in rule draws them."""
        judgement = self.judged.get(done.group)
        return judgement.choices[index_of(done.execution)] if judgement is not None else None

    def dispatch_of(self, execution: ExecutionId) -> Dispatch | None:
        """None for a gateway that ran alone, whose executions have any name, and for a run that has lost its scores."""
        return self.dispatches.get(group_of(execution)) if self.dispatches else None

    def knows(self, execution: ExecutionId) -> bool:
        return not self.dispatches or self.dispatch_of(execution) is not None


class RecordedRun:
    """A run, or a gateway that ran alone and has no scores, as its journals tell it. Only calls of open executions are held in memory.

    The run may be going on: it is shown as it was when `scores` was first read. The scores are read before any call, as they name nothing
    that the gateway has not journalled before; whoever reads the gateways' journals twice sees in the second reading what it saw in the
    first one. All of it raises JournalError for a journal that cannot be read, and RecordError for records that contradict themselves.
    """

    def __init__(self, gateway_journals: Sequence[Path], controller_journal: Path | None = None, config: Path | None = None):
        """`controller_journal` and `config` are None for a gateway that ran alone."""
        self.gateway_journals, self.controller_journal, self.config = gateway_journals, controller_journal, config

    @classmethod
    def open(cls, path: Path | str) -> RecordedRun:
        """`path` is a run folder, a gateway's folder, or its journal. Raises ConfigError for anything else."""
        path = Path(path)
        if path.is_file():
            if path.name in ("controller.log", "trained.log"):
                raise ConfigError("not the journal of a gateway: give the run folder, or its gateway.log", file=str(path))
            return cls([path])
        for journal in (path / "gateway.log", path / "journal" / "gateway.log"):
            if journal.is_file() and not (path / "config.toml").is_file():
                return cls([journal])
        return cls.of(RunFolder.open(path))

    @classmethod
    def of(cls, folder: RunFolder) -> RecordedRun:
        return cls(folder.gateway_journals, folder.controller_journal, folder.config)

    @cached_property
    def scores(self) -> Scores:
        """Empty without a controller's journal: a run's calls are worth reading without them."""
        done: dict[ExecutionId, ExecutionDone] = {}
        dispatches: dict[GroupId, Dispatch] = {}
        judged: dict[GroupId, Judgement] = {}
        journal = self.controller_journal if self._has_scores else None
        for _, record in read(journal, ControllerRecord) if journal is not None else ():
            if isinstance(record, ExecutionDone):
                done[record.execution] = record
            elif isinstance(record, GroupJudged):
                judged[record.group] = record.judgement
            elif isinstance(record, Decided):
                dispatches |= {command.group: command for command in record.commands if isinstance(command, Dispatch)}
        return Scores(done, dispatches, judged)

    @property
    def _has_scores(self) -> bool:
        journal = self.controller_journal
        return journal is not None and journal.is_file() and journal.stat().st_size > 0

    @property
    def has_lost_scores(self) -> bool:
        """The journal of the controller is missing or empty, and with it every score."""
        return self.controller_journal is not None and not self._has_scores and self._has_calls

    @property
    def _has_calls(self) -> bool:
        return any(journal.is_file() for journal in self.gateway_journals)

    @property
    def is_before_first_call(self) -> bool:
        """Whether the run is still being started, or makes its policy first: nothing is lost then, there is nothing yet."""
        return self.controller_journal is not None and self.scores.is_empty and not self._has_calls

    def attempts(self, only: ExecutionId | None = None, *, until: Mapping[Path, int] | None = None) -> Iterator[CallLog]:
        """Every attempt, as soon as it is closed, gateway by gateway; those still open last.

        Nothing is seen that was written to a journal after its position in `until`.
        """
        if self.is_before_first_call:
            return iter(())
        records = (record for _, _, record in self._records(until))
        return recorded_attempts(records, lambda opened: only is None or opened.execution == only)

    def _records(self, until: Mapping[Path, int] | None = None) -> Iterator[tuple[Path, int, GatewayRecord]]:
        """(journal, position, record) of one gateway after the other. Sessions are numbered over all gateways of a run."""
        for journal in self.gateway_journals:
            if journal != self.gateway_journals[0] and not journal.is_file():
                continue  # the first one is missed if it is not there
            for position, record in read(journal, GatewayRecord, until=until.get(journal, 0) if until is not None else None):
                yield journal, position, record

    def last_attempts(self) -> Iterator[CallLog]:
        """The attempt of each execution that counts: the one that was scored, else the latest.

        Executions that were dispatched after `scores` was read are left out.
        """
        if self.is_before_first_call:
            return
        scores = self.scores
        latest: dict[ExecutionId, int] = {}
        ends: dict[Path, int] = {}
        for journal, position, record in self._records():
            ends[journal] = position
            if isinstance(record, Opened):
                latest[record.execution] = max(record.attempt, latest.get(record.execution, 0))
        for attempt in self.attempts(until=ends):
            execution = attempt.opened.execution
            counted = scores.done[execution].attempt if execution in scores.done else latest[execution]
            if attempt.opened.attempt == counted and scores.knows(execution):
                yield attempt

    def find(self, execution: str, attempt: int | None = None) -> CallLog:
        """One attempt of one execution, the latest unless `attempt` is given. Raises ConfigError, naming what there is."""
        attempts = {found.opened.attempt: found for found in self.attempts(ExecutionId(execution))}
        if not attempts:
            records = self._records() if not self.is_before_first_call else ()
            names = sorted({record.execution for _, _, record in records if isinstance(record, Opened)})
            some = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
            message = f"no execution {execution!r} was recorded; there are: {some or 'none yet'}"
            raise ConfigError(message, file=str(self.gateway_journals[0]))
        wanted = max(attempts) if attempt is None else attempt
        if wanted not in attempts:
            raise ConfigError(
                f"{execution} has no attempt {wanted}; it has {sorted(attempts)}", file=str(self.gateway_journals[0])
            )
        return attempts[wanted]
