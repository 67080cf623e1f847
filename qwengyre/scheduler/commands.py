"""What the scheduler decides, and how a driver answers.

Commands are started in the order of the list and run side by side; the scheduler never waits. A driver answers each one
below with its event, whenever it is done, and echoes the ticket.

| command | the driver does | answer |
| --- | --- | --- |
| Dispatch | picks the query of the group | none |
| Start | starts the harness of the execution, its calls go to `server` | ExecutionEnded, in the end |
| Route | sends the execution's calls, held ones first, to `server` | none |
| Hold | holds the execution's calls until a Route | none |
| PrepareGroup | advantages, sampling, cuts micro-steps | GroupReady |
| Drain | stops admission at the cell, moves each execution of `moves` (pin KV, cancel, import, continue) | CellDrained |
| SwitchToTraining | offloads engine, restores trainer | CellInTraining |
| ReturnToRollout | drops what the trainer accumulated, offloads it, restores the engine with `version` | CellInRollout |
| OpenStep | core: zero accumulator, expose the snapshot of `step` | StepOpened |
| JoinStep | satellite: pull the snapshot of `step`, zero accumulator | StepJoined |
| TakeGroup | nothing; telemetry (staleness) | none |
| Compute | cell: forward and backward of one micro-step into its accumulator | MicroStepDone |
| CloseStep | reduce the accumulators of `members` into the core's scratch; keep the accumulators | StepReduced |
| RunOptimizer | core: take the scratch, divide by E, clip, step; skip the optimizer if E = 0 | StepDone |
| Publish | core: make a checkpoint durable, send the weights to all engines that serve | Published |
| ReportEvaluation | scores the evaluation | none |
| Regroup | builds the communicator groups of the prefixes of `order` | none |
| FinishRun | writes the end of the run | none |
| (a checkpoint became durable) | | CheckpointSaved |
| (a cell or standalone engine died, came back) | | CellLost, CellReturned, StandaloneLost, StandaloneReturned |
| (a harness died with its controller, or with another process of ours) | | ExecutionLost |

A `CloseStep` is void if a member is lost before its `StepReduced`: the others keep their accumulators, go on with what came
back, and a second `CloseStep` follows. Only `RunOptimizer` commits. An `OpenStep` of a step that was open before restarts it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.core.ids import CellId, ExecutionId, GroupId, MicroStepId, ServerId


class Command(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of what a driver is asked to do."""


class Ticketed(Command, frozen=True, gc=False):
    """A command that an event with its ticket answers."""

    ticket: int


class Dispatch(Command, frozen=True, tag=True):
    group: GroupId
    kind: Literal["train", "evaluation"]
    version: int
    """Policy version at the dispatch: steps done when it was published."""
    num_executions: int


class Start(Command, frozen=True, tag=True, gc=False):
    execution: ExecutionId
    attempt: int
    """0, and one more each time the execution was lost."""
    server: ServerId


class Route(Command, frozen=True, tag=True, gc=False):
    execution: ExecutionId
    server: ServerId


class Hold(Command, frozen=True, tag=True, gc=False):
    execution: ExecutionId


class Move(msgspec.Struct, frozen=True, gc=False):
    """One execution that a leaving cell hands over."""

    execution: ExecutionId
    server: ServerId
    """Where it goes; its slot there is already reserved."""


class Drain(Ticketed, frozen=True, tag=True):
    cell: CellId
    moves: tuple[Move, ...]


class SwitchToTraining(Ticketed, frozen=True, tag=True):
    cell: CellId


class ReturnToRollout(Ticketed, frozen=True, tag=True):
    cell: CellId
    version: int
    """The version whose weights the engine must serve."""


class PrepareGroup(Command, frozen=True, tag=True):
    group: GroupId


class OpenStep(Ticketed, frozen=True, tag=True):
    step: int
    """Steps done before it: the first step is 0."""


class JoinStep(Ticketed, frozen=True, tag=True):
    cell: CellId
    step: int


class TakeGroup(Command, frozen=True, tag=True):
    group: GroupId
    step: int
    staleness: int
    """Steps done now minus the version at the group's dispatch."""


class Compute(Ticketed, frozen=True, tag=True, gc=False):
    cell: CellId
    step: int
    micro_step: MicroStepId


class CloseStep(Ticketed, frozen=True, tag=True):
    step: int
    epoch: int
    """Membership epoch: which communicator groups to reduce over."""
    members: tuple[CellId, ...]
    """A prefix of the order of the epoch, the core first. Members without a gradient add zeros."""


class RunOptimizer(Ticketed, frozen=True, tag=True):
    step: int
    num_executions: int
    """E: valid executions of the step's groups, the divisor of its loss."""


class Publish(Ticketed, frozen=True, tag=True):
    version: int


class ReportEvaluation(Command, frozen=True, tag=True):
    version: int
    groups: tuple[GroupId, ...]


class Regroup(Command, frozen=True, tag=True):
    epoch: int
    order: tuple[CellId, ...]
    """The cells that live, in the order of leaving: the core first, a cell that came back last."""


class FinishRun(Command, frozen=True, tag=True):
    steps: int


AnyCommand = (
    Dispatch
    | Start
    | Route
    | Hold
    | Drain
    | SwitchToTraining
    | ReturnToRollout
    | PrepareGroup
    | OpenStep
    | JoinStep
    | TakeGroup
    | Compute
    | CloseStep
    | RunOptimizer
    | Publish
    | ReportEvaluation
    | Regroup
    | FinishRun
)
"""The union to decode a journal with: `msgspec.msgpack.Decoder(AnyCommand)`."""
AnyTicketed = Drain | SwitchToTraining | ReturnToRollout | OpenStep | JoinStep | Compute | CloseStep | RunOptimizer | Publish
"""Those that wait for an answer."""
