"""The executions, groups and tasks of a run, as its controller's journal tells them. Read on as the journal grows.

Only a few numbers of each execution are held, so that a run of 100,000 takes tens of megabytes. What it said lies in the gateway's
journal (`call_index.py`).
"""

from __future__ import annotations

from pathlib import Path
from sys import intern
from typing import Final

import msgspec

from qwengyre.core.ids import ExecutionId, GroupId, group_of, index_of
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.dashboard.journal_follower import JournalFollower
from qwengyre.runtime.records import ControllerRecord, Decided, ExecutionDone, GroupJudged, RunOpened
from qwengyre.scheduler.commands import CloseStep, Compute, Dispatch, RunOptimizer, Start, TakeGroup
from qwengyre.scheduler.events import Event, TicketedAnswer
from qwengyre.trajectory.advantages import group_advantages
from qwengyre.trajectory.process import Judgement

MAX_DETAIL: Final = 400
"""Characters that are held of why an execution failed: a sentence or two; the whole lies beside its workspace."""


class ExecutionEntry(msgspec.Struct, gc=False, kw_only=True):
    """One execution as it stands. Numbers that only its end tells are None until then."""

    execution: ExecutionId
    group: GroupId
    index: int
    """Its place in the group."""
    kind: str
    """`train` or `evaluation`."""
    version: int
    """Policy version at the dispatch of its group."""
    attempt: int = 0
    started_at: float = 0.0
    """Of this attempt, seconds on the run's clock."""
    ended_at: float | None = None
    task: str = ""
    temperature: float | None = None
    reward: float | None = None
    validity: str = ""
    end: str = "running"
    num_calls: int | None = None
    num_tokens: int | None = None
    """Sampled."""
    num_distinct: int | None = None
    compactions: int = 0
    sub_agents: int = 0
    calls_moved: int = 0
    detail: str = ""

    @property
    def seconds(self) -> float | None:
        """From its start to its score, on the run's clock."""
        return None if self.ended_at is None else self.ended_at - self.started_at

    @property
    def counted_reward(self) -> float | None:
        """None for one that is running or was dropped."""
        return None if self.reward is None or self.validity == Validity.DROPPED.value else self.reward


class GroupEntry(msgspec.Struct, gc=False, kw_only=True):
    """One rollout group, or the executions of one task in one evaluation."""

    group: GroupId
    kind: str
    version: int
    num_executions: int
    task: str = ""
    step: int | None = None
    """The step that trained on it, counted from 1; None until then, and for evaluations."""
    staleness: int | None = None
    judgement: Judgement | None = None
    """What hooks said of it."""


class ExecutionTable(JournalFollower):
    """Everything that the journal says so far; `refresh` reads what came since."""

    def __init__(self, journal: Path):
        super().__init__(journal, ControllerRecord)
        self.executions: dict[ExecutionId, ExecutionEntry] = {}
        self.groups: dict[GroupId, GroupEntry] = {}
        self.tasks: dict[str, list[GroupId]] = {}
        """Groups of each task, in the order in which the first of their executions ended."""
        self.at = 0.0
        """Of the last event, seconds on the run's clock."""
        self.busy_s = {"training": 0.0}
        """Seconds in which cells computed micro-steps, reduced and updated, summed over cells."""
        self._asked: dict[int, float] = {}
        """Ticket of work in training that goes on -> when it began."""

    def members(self, group: GroupId) -> list[ExecutionEntry]:
        """Executions of a group in their order."""
        entry = self.groups[group]
        names = (ExecutionId(f"e{group:06d}-{index}") for index in range(entry.num_executions))
        return [self.executions[name] for name in names if name in self.executions]

    def advantage(self, execution: ExecutionId, *, divide_by_std: bool = False) -> float | None:
        """Of a training execution whose group has ended; None for any other, and for one that was dropped."""
        entry = self.executions[execution]
        members = self.members(entry.group)
        group = self.groups[entry.group]
        if group.kind != "train" or len(members) < group.num_executions or any(one.reward is None for one in members):
            return None
        if group.judgement is not None:
            return group.judgement.advantages[entry.index]
        values = group_advantages([_outcome(one) for one in members], divide_by_std=divide_by_std)
        return values[members.index(entry)]

    def _take(self, record: object) -> None:
        match record:
            case Event():
                self.at = record.at
                if isinstance(record, TicketedAnswer) and record.ticket in self._asked:
                    self.busy_s["training"] += self.at - self._asked.pop(record.ticket)
            case RunOpened():
                self._asked.clear()  # what a kill cut off is never answered
            case Decided():
                for command in record.commands:
                    self._decided(command)
            case ExecutionDone():
                self._done(record)
            case GroupJudged():
                self.groups[record.group].judgement = record.judgement

    def _decided(self, command: object) -> None:
        match command:
            case Dispatch(group, kind, version, num_executions):
                self.groups[group] = GroupEntry(group=group, kind=kind, version=version, num_executions=num_executions)
            case Start(execution, attempt):
                known, entry = self.executions.get(execution), self.groups[group_of(execution)]
                if known is None or known.attempt != attempt or known.ended_at is None:
                    self.executions[execution] = ExecutionEntry(
                        execution=execution,
                        group=entry.group,
                        index=index_of(execution),
                        kind=entry.kind,
                        version=entry.version,
                        attempt=attempt,
                        started_at=self.at,
                    )
            case Compute() | CloseStep() | RunOptimizer():
                self._asked[command.ticket] = self.at
            case TakeGroup(group_id, step, staleness):
                taken = self.groups[group_id]
                taken.step, taken.staleness = step + 1, staleness

    def _done(self, done: ExecutionDone) -> None:
        entry = self.executions.get(done.execution)
        if entry is None or done.attempt != entry.attempt:
            return
        outcome, counts = done.outcome, done.counts
        entry.task, entry.temperature, entry.ended_at = intern(done.task), done.temperature, done.at
        entry.reward, entry.validity, entry.end = outcome.score, outcome.validity.value, outcome.end.value
        entry.num_calls, entry.num_tokens, entry.num_distinct = counts.calls, counts.tokens_sampled, counts.tokens_distinct
        entry.compactions, entry.sub_agents, entry.calls_moved = counts.compactions, counts.sub_agents, counts.calls_moved
        entry.detail = outcome.detail.strip()[:MAX_DETAIL]
        group = self.groups[entry.group]
        if not group.task:
            group.task = entry.task
            self.tasks.setdefault(entry.task, []).append(group.group)


def _outcome(entry: ExecutionEntry) -> Outcome:
    return Outcome(
        end=End(entry.end), validity=Validity(entry.validity), score=entry.reward or 0.0, scored_state="", duration_s=0.0
    )
