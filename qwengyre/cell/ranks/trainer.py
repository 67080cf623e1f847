"""The trainer of a cell of several ranks: every operation on all of them at once. The interface of `trainer.Trainer`."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist
from torch import Tensor

from qwengyre.cell.kinds import Home
from qwengyre.cell.ranks.rank import Rank, RankSpec
from qwengyre.cell.ranks.rendezvous import Meeting
from qwengyre.core.errors import QwenGyreError
from qwengyre.core.records import MicroStep
from qwengyre.rpc.processes import announce
from qwengyre.rpc.refusal import Refused, rebuild
from qwengyre.rpc.tether import tethered
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats, total_of
from qwengyre.transfer.api import Exposure

log = logging.getLogger(__name__)
RANK_LOST = 70
"""Exit code of a cell one of whose ranks has died: the whole cell is lost."""


class RankedTrainer:
    """Rank 0 here. The others are children, which end with this process, or on other machines, and end with their connection.

    When one of them ends, so does this process; of those on other machines the launcher knows first.
    """

    def __init__(self, model_dir: Path, config: TrainerConfig, home: Home) -> None:
        host, meeting = home.place.host, home.meeting
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        first = RankSpec(0, f"{host}:{store.port}", str(model_dir), config, home.place, home.threads)
        specs = [msgspec.structs.replace(first, rank=rank) for rank in range(1, config.ranks)]
        num_children = (meeting.ranks_here or config.ranks) - 1
        self._others = [start_rank(spec) for spec in specs[:num_children]] + await_ranks(specs[num_children:], meeting, host)
        self._first = Rank(first, home.carrier, store)

    def connect_members(self, rank: int, world: int, store_address: str, epoch: int, timeout_s: float) -> RankedMembers:
        """Shard r of every cell meets shard r of the others. Raises MembershipBroken."""
        self._on_all("connect", rank, world, store_address, epoch, timeout_s)
        return RankedMembers(self)

    def begin_step(self, step: int) -> None:
        self._on_all("begin_step", step)

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Its executions dealt out to the ranks. Raises what any rank raises, with nothing added to any sum."""
        return total_of(micro_step.micro_step, self._on_all("compute", micro_step))

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

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict | None = None) -> None:
        self._on_all("save_checkpoint", directory, step, files, extra)

    def load_checkpoint(self, directory: Path) -> dict:
        return self._on_all("load_checkpoint", directory)[0]

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        """The answers by rank. Raises this rank's error, else that of the first rank that has one."""
        with _exit_without_them():
            for connection in self._others:
                connection.send((method, args))
        try:
            answers = [self._first.call(method, args)]
        except QwenGyreError:
            self._answers()
            raise
        answers += self._answers()
        if refusal := next((answer for answer in answers if isinstance(answer, Refused)), None):
            raise rebuild(refusal)
        return answers

    def _answers(self) -> list[Any]:
        with _exit_without_them():
            return [connection.recv() for connection in self._others]


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
    program = tethered("qwengyre.cell.ranks.process", [str(its.fileno())])
    process = subprocess.Popen(program, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    ours.send(spec)
    threading.Thread(target=_end_with, args=(spec.rank, process), name=f"rank-{spec.rank}", daemon=True).start()
    return ours


def await_ranks(specs: Sequence[RankSpec], meeting: Meeting, host: str) -> list[Connection]:
    """Until every rank that another machine starts has come; the cell's launcher has a deadline for that."""
    came: dict[int, Connection] = {}
    if not specs:
        return []
    wanted = {spec.rank: spec for spec in specs}
    with Listener((host, 0), backlog=len(specs), authkey=meeting.secret) as listener:
        announce(Path(meeting.address_file), f"{host}:{listener.address[1]}".encode())
        while missing := sorted(wanted.keys() - came.keys()):
            log.info("waits_for_ranks", extra={"missing": missing})
            try:
                connection = listener.accept()
                rank = connection.recv()
                connection.send(wanted[rank])
            except (AuthenticationError, EOFError, OSError, KeyError) as error:
                log.warning("not_a_rank", extra={"reason": repr(error)})
                continue
            came[rank] = connection
    return [came[spec.rank] for spec in specs]


def _end_with(rank: int, process: subprocess.Popen) -> None:
    code = process.wait()
    log.error("rank_lost", extra={"rank": rank, "exit_code": code})
    os._exit(RANK_LOST)


@contextmanager
def _exit_without_them() -> Iterator[None]:
    """A rank of another machine is no child of ours: its end is seen when one talks with it."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        log.error("rank_lost", extra={"reason": repr(error)})
        os._exit(RANK_LOST)
