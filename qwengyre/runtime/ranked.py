"""The trainer of a cell of several ranks: every operation on all of them at once. The interface of `trainer.Trainer`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist
from torch import Tensor

from qwengyre.core.errors import QwenGyreError, renewed
from qwengyre.core.records import MicroStep
from qwengyre.runtime.rank import HOST, Rank, RankSpec, Refusal
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats, sum_of_ranks
from qwengyre.transfer.api import Carrier, Exposure
from qwengyre.transfer.carriers import CarrierPlace

log = logging.getLogger(__name__)
RANK_LOST = 70
"""Exit code of a cell one of whose ranks has died: the whole cell is lost."""


class RankedTrainer:
    """Rank 0 here, the others as children, which end with this process; when one of them ends, so does this process."""

    def __init__(self, model_dir: Path, config: TrainerConfig, carrier: Carrier, place: CarrierPlace, threads: int) -> None:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        first = RankSpec(0, store.port, str(model_dir), config, place, threads)
        self._others = [start_rank(msgspec.structs.replace(first, rank=rank)) for rank in range(1, config.ranks)]
        self._first = Rank(first, carrier, store)

    def connect_members(self, rank: int, world: int, store_address: str, epoch: int, timeout_s: float) -> RankedMembers:
        """Shard r of every cell meets shard r of the others. Raises MembershipBroken."""
        self._on_all("connect", rank, world, store_address, epoch, timeout_s)
        return RankedMembers(self)

    def begin_step(self, step: int) -> None:
        self._on_all("begin_step", step)

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Its executions dealt out to the ranks. Raises what any rank raises, with nothing added to any sum."""
        return sum_of_ranks(self._on_all("compute", micro_step))

    def flat_gradient(self) -> Tensor:
        """Of this rank; the members reduce those of all."""
        return self._first.trainer.flat_gradient()

    def reduce(self, num_members: int) -> None:
        self._on_all("reduce", num_members)

    def close_members(self) -> None:
        self._on_all("close")

    def apply(self, num_executions: int, summed: object | None = None) -> StepStats:
        """`summed` is what `RankedMembers.reduce` returned: every rank has its own shard of it."""
        return self._on_all("apply", num_executions, summed is not None)[0]

    def expose(self, version: int, epoch: int = 0) -> Exposure:
        first, *others = self._on_all("expose", version, epoch)
        return msgspec.structs.replace(first, others=tuple(others))

    def pull(self, exposure: Exposure) -> None:
        self._on_all("pull", exposure)

    def offload(self) -> None:
        self._on_all("offload")

    def restore(self) -> None:
        self._on_all("restore")

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        return self._on_all("audit", micro_steps, snapshots_dir)[0]

    def whole_weights(self) -> dict[str, np.ndarray]:
        return self._on_all("whole_weights")[0]

    def save_weights(self, path: Path) -> None:
        self._on_all("save_weights", path)

    def save_checkpoint(self, directory: Path, step: int, extra: dict | None = None) -> None:
        self._on_all("save_checkpoint", directory, step, extra)

    def load_checkpoint(self, directory: Path) -> dict:
        return self._on_all("load_checkpoint", directory)[0]

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        """The answers by rank. Raises this rank's error, else that of the first rank that has one."""
        for connection in self._others:
            connection.send((method, args))
        try:
            answers = [self._first.call(method, args)]
        except QwenGyreError:
            for connection in self._others:
                connection.recv()
            raise
        answers += [connection.recv() for connection in self._others]
        if refusal := next((answer for answer in answers if isinstance(answer, Refusal)), None):
            raise renewed(refusal.kind, refusal.message)
        return answers


class RankedMembers:
    """The members of a step as a cell of several ranks sees them."""

    def __init__(self, trainer: RankedTrainer) -> None:
        self._trainer = trainer

    def reduce(self, gradient: Tensor, num_members: int) -> RankedMembers:
        """Every rank sums its own shard and keeps it for `RankedTrainer.apply`."""
        self._trainer.reduce(num_members)
        return self

    def close(self) -> None:
        self._trainer.close_members()


def start_rank(spec: RankSpec) -> Connection:
    """A child process for one rank; when it ends, this process ends."""
    ours, its = Pipe()
    program = [sys.executable, "-m", "qwengyre.runtime.supervised", "qwengyre.runtime.rank_process", str(its.fileno())]
    process = subprocess.Popen(program, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    ours.send(spec)
    threading.Thread(target=_end_with, args=(spec.rank, process), name=f"rank-{spec.rank}", daemon=True).start()
    return ours


def _end_with(rank: int, process: subprocess.Popen) -> None:
    code = process.wait()
    log.error("rank_lost", extra={"rank": rank, "exit_code": code})
    os._exit(RANK_LOST)
