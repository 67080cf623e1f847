"""What a cell can be asked, as one table: each operation is a frozen Struct, its reply another.

They go over the wire of `rpc/`. Every request carries the incarnation of the cell's process, so that a request or a reply that
outlived a restart is refused. Order of use:

    rollout:      UpdateWeights at every publish
    to training:  EnterTraining, then per step: BeginStep, Compute*, Reduce (all members at once), Apply (core)
    to rollout:   EnterRollout
    core:         ExposeSnapshot (before every step, and at every publish), SaveSnapshot and SaveCheckpoint, LoadCheckpoint after a loss
    any cell:     HoldSnapshot (before it reads what it shall serve on), ExposeFile (what was published, when no core of this life has exposed it), Audit (at the end), Health
"""

from __future__ import annotations

import msgspec

from qwengyre.core.records import MicroStep
from qwengyre.engines.api import Capacity, EngineStats
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats
from qwengyre.transfer.api import Exposure


class Timed(msgspec.Struct, frozen=True, tag=True):
    """An operation that returns nothing but how long its phases took."""

    phases_s: dict[str, float] = {}


class OfferStore(msgspec.Struct, frozen=True, tag=True):
    """Open a store in which the members of the next steps find each other. Asked of the first of them."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    address: str


class ConnectMembers(msgspec.Struct, frozen=True, tag=True):
    """Build the prefix groups 2..K of one membership. All cells of `cell_order` get this at the same time."""

    membership: int
    """Counted up at every change."""
    store: str
    """Address that the first of them has offered."""
    cell_order: tuple[int, ...]


class EnterTraining(msgspec.Struct, frozen=True, tag=True):
    """Offload the engine, take the trainer's memory. Refused while a request runs."""


class EnterRollout(msgspec.Struct, frozen=True, tag=True):
    """Offload the trainer, restore the engine with the published weights."""

    snapshot: Exposure
    version: int


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    """Join step `step`: zero the sums and, for a satellite, read the core's snapshot."""

    step: int
    snapshot: Exposure | None


class Compute(msgspec.Struct, frozen=True, tag=True):
    micro_step: MicroStep


class Reduce(msgspec.Struct, frozen=True, tag=True):
    """Sum the members' gradients at the core. Its own sums stay as they were until `Apply`."""

    num_members: int


class Apply(msgspec.Struct, frozen=True, tag=True):
    """All members have confirmed: divide once, clip, update. Core only."""

    num_executions: int


class ExposeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Put the core's weights where others read them. A step's snapshot lives until the next step; a published one
    until the publish after the next, because cells return to it at any time.
    """

    version: int
    is_publish: bool


class ExposeFile(msgspec.Struct, frozen=True, tag=True):
    """Expose the weights of a snapshot file as `version`, for engines that come back after a restart."""

    path: str
    version: int


class HoldSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Read a snapshot into memory of the cell that others can read: it serves it on (`transfer/tree.py`). What it held of the same kind
    before goes."""

    snapshot: Exposure
    is_publish: bool


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    snapshot: Exposure
    version: int


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Weights, optimizer and the journal position, durable before the reply."""

    directory: str
    step: int
    journal_position: int
    files: str
    """Folder with the policy's config, tokenizer and renderer, which are copied beside the weights."""


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    directory: str


class SaveSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Weights only: for the audit of log-probs, and for publishes after a loss of the core."""

    directory: str
    version: int


class Audit(msgspec.Struct, frozen=True, tag=True):
    """Compare recorded log-probs with a trainer forward under each span's own version."""

    micro_steps: tuple[MicroStep, ...]
    snapshots_dir: str


class Audited(msgspec.Struct, frozen=True, tag=True):
    report: AuditReport


class Health(msgspec.Struct, frozen=True, tag=True):
    pass


class HealthReport(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity
    engine: EngineStats


class Computed(msgspec.Struct, frozen=True, tag=True):
    stats: MicroStepStats


class Applied(msgspec.Struct, frozen=True, tag=True):
    stats: StepStats


class Exposed(msgspec.Struct, frozen=True, tag=True):
    snapshot: Exposure


Operation = (
    OfferStore
    | ConnectMembers
    | EnterTraining
    | EnterRollout
    | BeginStep
    | Compute
    | Reduce
    | Apply
    | ExposeSnapshot
    | ExposeFile
    | HoldSnapshot
    | UpdateWeights
    | SaveCheckpoint
    | LoadCheckpoint
    | SaveSnapshot
    | Audit
    | Health
)


class CellRequest(msgspec.Struct, frozen=True, tag=True):
    """One operation for one incarnation of the cell's process."""

    incarnation: int
    operation: Operation
