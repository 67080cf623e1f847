"""A `Trainer` among those of other cells: the whole trainer of a cell of one process, or one rank's part of a cell of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from qwengyre.core.records import MicroStep
from qwengyre.trainer.api import Membership
from qwengyre.trainer.members import Members
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.api import Exposure


class MemberTrainer:
    """Implements `trainer.api.CellTrainer`. Shard r of every cell sums with shard r of the others, and reads from it."""

    def __init__(self, trainer: Trainer, secret: bytes, shard: int = 0) -> None:
        self.trainer, self._secret, self._shard = trainer, secret, shard
        self._members: Members | None = None
        self._sum: Tensor | None = None
        """What the members have summed, until it is applied."""

    def connect(self, membership: Membership) -> None:
        self.close()
        self._members = Members.connect(membership, self._secret, self._shard, self.trainer.device)

    def close(self) -> None:
        if self._members is not None:
            self._members.close()
            self._members = None

    def pull(self, snapshot: Exposure) -> None:
        self.trainer.pull((snapshot, *snapshot.others)[self._shard])

    def begin_step(self, step: int) -> None:
        self._sum = None
        self.trainer.begin_step(step)

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        return self.trainer.compute(micro_step)

    def reduce(self, num_members: int) -> None:
        self._sum = None
        if num_members > 1:
            assert self._members is not None, "members are connected before they reduce"
            self._sum = self._members.reduce(self.trainer.flat_gradient(), num_members)

    def apply(self, num_executions: int) -> StepStats:
        stats, self._sum = self.trainer.apply(num_executions, self._sum), None
        return stats

    def expose(self, version: int, incarnation: int) -> Exposure:
        return self.trainer.expose(version, incarnation)

    def publishable(self) -> dict[str, np.ndarray]:
        return self.trainer.published()

    def gather(self) -> None:
        """`publishable` on a rank other than 0, which has the result."""
        self.trainer.published()

    def offload(self) -> None:
        self._sum = None
        self.trainer.offload()

    def restore(self) -> None:
        self.trainer.restore()

    def save_weights(self, path: Path) -> None:
        self.trainer.save_weights(Path(path))

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict[str, Any]) -> None:
        self.trainer.save_checkpoint(Path(directory), step, Path(files), extra)

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        return self.trainer.load_checkpoint(Path(directory))

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        return self.trainer.audit(micro_steps, Path(snapshots_dir))
