"""What the scheduler is told. Every event carries `at`, seconds on the driver's clock, never decreasing.

Most events answer a command and echo its `ticket` (the table is in `commands`). An answer whose ticket is no longer awaited,
because its cell or its step was lost meanwhile, is ignored: a driver never has to fence late answers itself.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from qwengyre.core.ids import CellId, ExecutionId, GroupId, MicroStepId
from qwengyre.scheduler.config import OrderName


class Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    at: float
    """Seconds on the driver's clock; the scheduler has no other notion of now."""


class TicketedAnswer(Event, frozen=True, gc=False):
    """An answer to the command with its ticket."""

    ticket: int


class RunStarted(Event, frozen=True, tag=True):
    """All cells are up in the rollout role and serve version 0. The first event, once."""


class ExecutionEnded(Event, frozen=True, tag=True, gc=False):
    """An execution is over, scored or dropped: its harness is gone and its outcome durable."""

    execution: ExecutionId
    attempt: int
    """As in its `Start`; an end of an earlier attempt is ignored."""


class ExecutionLost(Event, frozen=True, tag=True, gc=False):
    """The harness died with its controller, or with another process of ours that it needs: the execution is to be started again from its task."""

    execution: ExecutionId
    attempt: int


class GroupReady(Event, frozen=True, tag=True):
    """Answers `PrepareGroup`: the trajectories of a group are chosen and cut into micro-steps."""

    group: GroupId
    micro_steps: tuple[MicroStepId, ...]
    """In the order to compute them. May be empty: equal rewards leave nothing to learn, but the group counts."""
    num_valid: int
    """Executions of the group that count in E, the divisor of the step's loss."""


class CellDrained(TicketedAnswer, frozen=True, tag=True):
    """Answers `Drain`: every move is routed, no call is left at the cell, its pinned KV was confirmed or given up."""

    cell: CellId


class CellInTraining(TicketedAnswer, frozen=True, tag=True):
    """Answers `SwitchToTraining`."""

    cell: CellId


class CellInRollout(TicketedAnswer, frozen=True, tag=True):
    """Answers `ReturnToRollout`: the engine serves again, with the weights of the published version."""

    cell: CellId


class StepOpened(TicketedAnswer, frozen=True, tag=True):
    """Answers `OpenStep`: the core's snapshot is exposed and its accumulator is zero."""


class StepJoined(TicketedAnswer, frozen=True, tag=True):
    """Answers `JoinStep`: the satellite holds the step's snapshot and its accumulator is zero."""

    cell: CellId


class MicroStepDone(TicketedAnswer, frozen=True, tag=True, gc=False):
    """Answers `Compute`: the gradient is in the cell's own accumulator, not yet in the core's."""

    cell: CellId


class StepReduced(TicketedAnswer, frozen=True, tag=True):
    """Answers `CloseStep`: the sum over all members lies in the core's scratch, and all members have confirmed."""


class StepDone(TicketedAnswer, frozen=True, tag=True):
    """Answers `RunOptimizer`: the core holds the weights of the next step."""


class CheckpointSaved(Event, frozen=True, tag=True):
    """A checkpoint from which the core can be restored after `step` steps is durable. Unasked, at any time."""

    step: int


class Published(TicketedAnswer, frozen=True, tag=True):
    """Answers `Publish`: the version is durable, and every cell and standalone engine that serves has it."""


class Retuned(Event, frozen=True, tag=True, omit_defaults=True):
    """A plan made from what the run has measured. It holds from the next publish on, which it may bring forward. Unasked, with `tune` only."""

    steps_per_burst: int
    dispatch_depth: float
    two_way: bool
    backlog: float
    reason: str
    """For people: what was simulated, and what the change is worth."""
    order: OrderName | UnsetType = UNSET
    """Unset in journals of runs whose plans left the order as it was."""

    def plan(self) -> dict[str, int | float | bool | str]:
        """By the name of the field of `SchedulerConfig`."""
        names = ("steps_per_burst", "dispatch_depth", "two_way", "backlog", "order")
        return {name: value for name in names if (value := getattr(self, name)) is not UNSET}


class Foreseen(Event, frozen=True, tag=True):
    """How long executions of the next training groups are expected to take, before they are dispatched. Unasked, with `order` or `tune` only."""

    first: int
    """Number of the first of these groups among all training groups, in the order of dispatch."""
    seconds: tuple[float, ...]
    """Of each of them; 0 where nothing is known."""


class Reconfigured(Event, frozen=True, tag=True, omit_defaults=True):
    """The user changed the config of a run that had begun: what is given here holds in place of what held before.

    `steps` and evaluations hold at once, the others from the next publish on, as with `Retuned`. Unasked. Fields are those of
    `SchedulerConfig`; whatever is not here cannot change, because what was decided by it is under way.
    """

    steps: int | UnsetType = UNSET
    steps_per_burst: int | UnsetType = UNSET
    dispatch_depth: float | UnsetType = UNSET
    two_way: bool | UnsetType = UNSET
    backlog: float | UnsetType = UNSET
    evaluation_every_steps: int | UnsetType = UNSET
    evaluate_at_end: bool | UnsetType = UNSET

    def changes(self) -> dict[str, int | float | bool]:
        """By the name of the field."""
        return {name: value for name in CHANGEABLE if (value := getattr(self, name)) is not UNSET}


CHANGEABLE: Final = tuple(name for name in Reconfigured.__struct_fields__ if name != "at")
"""Fields of `SchedulerConfig` that may change while a run goes on."""


class CellLost(Event, frozen=True, tag=True):
    """A cell's process is gone, with its accumulator, its KV and (the core) the weights since the last checkpoint."""

    cell: CellId


class CellReturned(Event, frozen=True, tag=True):
    """A new process of a lost cell is up in the rollout role, with the weights of the published version."""

    cell: CellId
    step: int | None = None
    """The core only: steps done in the checkpoint that it was restored from."""


class StandaloneLost(Event, frozen=True, tag=True):
    index: int


class StandaloneReturned(Event, frozen=True, tag=True):
    index: int


AnyEvent = (
    RunStarted
    | ExecutionEnded
    | ExecutionLost
    | GroupReady
    | CellDrained
    | CellInTraining
    | CellInRollout
    | StepOpened
    | StepJoined
    | MicroStepDone
    | StepReduced
    | StepDone
    | CheckpointSaved
    | Published
    | Retuned
    | Foreseen
    | Reconfigured
    | CellLost
    | CellReturned
    | StandaloneLost
    | StandaloneReturned
)
"""The union to decode a journal with: `msgspec.msgpack.Decoder(AnyEvent)`."""
