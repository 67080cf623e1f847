"""What the controller journals, beside the scheduler's events and commands.

The journal is the run's durable truth: replaying its events through a new Scheduler gives the same commands, byte for byte,
and the state that a resumed run goes on from.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.core.records import Outcome
from qwengyre.scheduler.commands import AnyCommand
from qwengyre.scheduler.events import AnyEvent
from qwengyre.trajectory.process import Judgement


class RunOpened(msgspec.Struct, frozen=True, tag=True):
    """First record of every life of the controller."""

    life: int
    """0, and one more for every `--resume`."""
    at: float
    """Seconds on the run's clock, which goes on where the last life stopped."""
    wall_time: str
    """ISO 8601, for people only."""
    changes: tuple[str, ...] = ()
    """`--set` of this life and of those before it, as "table.key=value": its config is config.toml with these."""


class Decided(msgspec.Struct, frozen=True, tag=True):
    """The commands that the event before this record led to."""

    commands: tuple[AnyCommand, ...]


class CallCounts(msgspec.Struct, frozen=True):
    """What one execution did, counted on its tree."""

    calls: int = 0
    tokens_sampled: int = 0
    tokens_distinct: int = 0
    compactions: int = 0
    sub_agents: int = 0
    calls_moved: int = 0


class ExecutionDone(msgspec.Struct, frozen=True, tag=True):
    """One execution is over and scored. Appended before the scheduler hears of it."""

    execution: ExecutionId
    group: GroupId
    attempt: int
    task: str
    temperature: float
    outcome: Outcome
    counts: CallCounts
    at: float


class TaskChosen(msgspec.Struct, frozen=True, tag=True):
    """A task source said what a group runs. Appended before any execution of it is started."""

    group: GroupId
    task: str
    folder: str


class GroupJudged(msgspec.Struct, frozen=True, tag=True):
    """What hooks said of a group. Appended before anything of it is trained: no later life asks them again."""

    group: GroupId
    judgement: Judgement


class StepPoisoned(msgspec.Struct, frozen=True, tag=True):
    """A loss was not finite: the step is not applied, its micro-step is kept for inspection."""

    step: int
    reason: str
    kept_in: str


class RoleSwitched(msgspec.Struct, frozen=True, tag=True):
    """A cell changed its role, or did not: then it was fenced, and the scheduler heard of its loss."""

    cell: int
    role: Literal["training", "rollout"]
    """Where it went."""
    phases_s: dict[str, float]
    """Seconds of each phase that ended, in order: drain, offload_engine, restore_trainer; offload_trainer, restore_engine."""
    at: float
    failed: str = ""
    """Why it broke off, and in which phase."""


ControllerRecord = AnyEvent | RunOpened | Decided | ExecutionDone | TaskChosen | GroupJudged | StepPoisoned | RoleSwitched
