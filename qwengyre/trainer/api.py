"""What every trainer of a cell does, whatever it is made of. A cell knows no other interface, and no kinds.

Every kind passes `tests/contract/test_trainers.py`: one process (`trainer/member.py`), several ranks (`cell/ranks/trainer.py`), and the
one that only takes time (`paced/trainer.py`).

    core       begin_step  compute*  reduce  apply  expose  save_checkpoint
    satellite  pull  begin_step  compute*  reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from qwengyre.core.records import MicroStep
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats
from qwengyre.transfer.api import Exposure


class Membership(msgspec.Struct, frozen=True):
    """Who sums gradients together from now on, as one of them sees it."""

    number: int
    """Counted up at every change, so that words of two memberships are never taken for one another's."""
    rank: int
    """0 is the core."""
    world: int
    store: str
    """`tcp://HOST:PORT` of the `KeyStore` in which they find each other."""
    timeout_s: float
    """Longest wait for the others, in connecting and in each sum."""


class CellTrainer(Protocol):
    """Synchronous, one owner, one thread. Sums, never means: nothing is divided before the step closes.

    Raises the TrainerError family; TransferError where a snapshot is read.
    """

    def connect(self, membership: Membership) -> None:
        """Meet the trainers of the other cells; an earlier membership is over. Raises MembershipBroken when they do not come."""
        ...

    def pull(self, snapshot: Exposure) -> None:
        """Satellite: read the core's weights. Raises StaleRead, TransferError: then the weights are unusable until the next one."""
        ...

    def begin_step(self, step: int) -> None:
        """Zero the sums, and forget what `reduce` summed."""
        ...

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Add the gradient of one micro-step to the sums; all of it or, when this raises, nothing.

        Raises NonFiniteLoss (the step will not be applied), PathTooLong, TrainerError for a micro-step of another step.
        """
        ...

    def reduce(self, num_members: int) -> None:
        """Sum over the first `num_members` of the membership; the core keeps the result for `apply`. Own sums stay as they were.

        Can be done again, also with other members. Raises MembershipBroken when one of them does not take part.
        """
        ...

    def apply(self, num_executions: int) -> StepStats:
        """Core: close the step. Divide what was reduced last, or else the own sums, once; clip; update the weights.

        With 0 executions, or nothing that could be applied, the weights stay, and the reason is returned.
        """
        ...

    def expose(self, version: int, incarnation: int) -> Exposure:
        """Core: the weights of a step, where others can read them until the next one."""
        ...

    def publishable(self) -> dict[str, np.ndarray]:
        """Core: the weights as engines read them, whole, with the probe (`models/probe.py`)."""
        ...

    def offload(self) -> None:
        """Give back memory; the cell serves from now on. What the core cannot read from others it keeps."""
        ...

    def restore(self) -> None:
        """Take the memory of a step again. A satellite's weights are unusable until it pulls."""
        ...

    def save_weights(self, path: Path) -> None:
        """One safetensors file, whole or not at all."""
        ...

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict[str, Any]) -> None:
        """Weights, optimizer and `extra`, durable on return; config and tokenizer are copied from `files`."""
        ...

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Take a checkpoint's state; return what it says of itself: `step`, `extra`."""
        ...

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        """Compare recorded log-probs with a forward under the version that sampled each token; the weights come back."""
        ...

    def close(self) -> None:
        """Leave the membership."""
        ...
