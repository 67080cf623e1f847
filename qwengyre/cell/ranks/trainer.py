"""The trainer of a cell of several ranks: every request on all of them at once."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from qwengyre.cell.api import Applied, Apply, Audit, Audited, Compute, Computed, Exposed, LoadCheckpoint, Reduce
from qwengyre.cell.home import Home, RanksElsewhere
from qwengyre.cell.ranks import api
from qwengyre.cell.ranks.rank import carry_out, open_rank
from qwengyre.core.errors import QwenGyreError, TrainerError, Unreachable
from qwengyre.core.records import MicroStep
from qwengyre.rpc.channel import Channel
from qwengyre.rpc.connection import HELLO_DEADLINE_S
from qwengyre.rpc.doorway import Doorway
from qwengyre.rpc.processes import announce
from qwengyre.rpc.server import Done
from qwengyre.rpc.store import KeyStore
from qwengyre.rpc.tether import tethered
from qwengyre.rpc.tls import config_used
from qwengyre.trainer.api import Membership
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats, total_of
from qwengyre.transfer.api import Exposure

log = logging.getLogger(__name__)
RANK_LOST = 70
"""Exit code of a cell one of whose ranks has died: the whole cell is lost."""
Reply = TypeVar("Reply", bound=msgspec.Struct)
Result = TypeVar("Result")


class RankedTrainer:
    """Implements `trainer.api.CellTrainer`. Rank 0 here; the others are children, which end with this process, or on other machines.

    When one of them ends, so does this process; of those on other machines the launcher knows first.
    """

    def __init__(self, model_dir: Path, config: TrainerConfig, home: Home) -> None:
        """Raises Unreachable when ranks of other machines do not come in time."""
        self._store = KeyStore(home.place.host, home.secret)
        first = api.RankSpec(
            0, self._store.address, home.secret, str(model_dir), config, home.place, home.threads, home.token_loss, config_used()
        )
        specs = [msgspec.structs.replace(first, rank=rank) for rank in range(1, config.ranks)]
        num_children = (home.elsewhere.num_here or config.ranks) - 1
        self._others = start_ranks(specs[:num_children]) + await_ranks(specs[num_children:], home.elsewhere)
        self._rank = open_rank(first, home.transport)
        self._first = self._rank.member

    def connect(self, membership: Membership) -> None:
        self._on_all(api.Connect(membership), Done)

    def close(self) -> None:
        self._on_all(api.Close(), Done)

    def pull(self, snapshot: Exposure) -> None:
        self._on_all(api.Pull(snapshot), Done)

    def begin_step(self, step: int) -> None:
        self._on_all(api.BeginStep(step), Done)

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Its executions are dealt out to the ranks. What any rank refuses, all do, with nothing added to any sum."""
        replies = self._on_all(Compute(micro_step), Computed)
        return total_of(micro_step.micro_step, [reply.stats for reply in replies])

    def reduce(self, num_members: int) -> None:
        self._on_all(Reduce(num_members), Done)

    def apply(self, num_executions: int) -> StepStats:
        return self._on_all(Apply(num_executions), Applied)[0].stats

    def expose(self, version: int, incarnation: int) -> Exposure:
        first, *others = (reply.snapshot for reply in self._on_all(api.Expose(version, incarnation), Exposed))
        return msgspec.structs.replace(first, others=tuple(others))

    def publishable(self) -> dict[str, np.ndarray]:
        whole, _ = self._beside(api.Gather(), self._first.publishable, Done)
        return whole

    def offload(self) -> None:
        self._on_all(api.Offload(), Done)

    def restore(self) -> None:
        self._on_all(api.Restore(), Done)

    def save_weights(self, path: Path) -> None:
        self._on_all(api.SaveWeights(str(path)), Done)

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict[str, Any]) -> None:
        self._on_all(api.SaveCheckpoint(str(directory), step, str(files), extra), Done)

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        loaded, _ = self._beside(LoadCheckpoint(str(directory)), lambda: self._first.load_checkpoint(directory), Done)
        return loaded

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        return self._on_all(Audit(tuple(micro_steps), str(snapshots_dir)), Audited)[0].report

    def _on_all(self, request: msgspec.Struct, expected: type[Reply]) -> list[Reply]:
        """The replies by rank."""
        own, others = self._beside(request, lambda: carry_out(self._first, request), expected)
        assert isinstance(own, expected)
        return [own, *others]

    def _beside(self, request: msgspec.Struct, job: Callable[[], Result], expected: type[Reply]) -> tuple[Result, list[Reply]]:
        """`job()` here while the other ranks carry out `request`. Raises this rank's error, else that of the first that has one."""
        with _exit_without_them():
            for channel in self._others:
                channel.send(request)
        error: QwenGyreError | None = None
        results, replies = [], []
        try:
            results.append(job())
        except QwenGyreError as met:
            error = met
        for channel in self._others:
            try:
                with _exit_without_them():
                    replies.append(channel.reply(expected))
            except QwenGyreError as met:
                error = error or met
        if error is not None:
            raise error
        return results[0], replies


def start_ranks(specs: Sequence[api.RankSpec]) -> list[Channel]:
    """A child process for each; they import what they need side by side."""
    channels = [_start_rank(spec) for spec in specs]
    for channel, spec in zip(channels, specs, strict=True):
        _tell(channel, spec)
    return channels


def _tell(channel: Channel, spec: api.RankSpec) -> None:
    with _exit_without_them():
        channel.answer_one(api.Join, lambda join: spec)


def _start_rank(spec: api.RankSpec) -> Channel:
    """When it ends, this process ends."""
    ours, its = socket.socketpair()
    program = tethered("qwengyre.cell.ranks.process", [f"{its.fileno()}:{spec.rank}"])
    process = subprocess.Popen(program, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    threading.Thread(target=_end_with, args=(spec.rank, process), name=f"rank-{spec.rank}", daemon=True).start()
    return Channel(ours)


def await_ranks(specs: Sequence[api.RankSpec], elsewhere: RanksElsewhere) -> list[Channel]:
    """Until every rank that another machine starts has come. Raises Unreachable when one does not within the deadline."""
    if not specs:
        return []
    missing, came = {spec.rank: spec for spec in specs}, queue.SimpleQueue[tuple[int, Channel]]()

    def let_in(channel: Channel) -> None:
        def join(asked: api.Join) -> api.RankSpec:
            if (spec := missing.pop(asked.rank, None)) is None:
                raise TrainerError(f"this cell does not wait for a rank {asked.rank}")
            return spec

        try:
            channel.set_deadline(HELLO_DEADLINE_S)
            joined = channel.answer_one(api.Join, join)
        except (OSError, QwenGyreError) as error:
            log.warning("not_a_rank", extra={"reason": str(error)})
            channel.close()
        else:
            channel.set_deadline(None)
            came.put((joined.rank, channel))

    doorway = Doorway(specs[0].place.host, specs[0].secret, let_in)
    try:
        announce(Path(elsewhere.address_file), str(doorway.address).encode())
        return _gathered(came, [spec.rank for spec in specs], elsewhere.timeout_s)
    finally:
        doorway.close()


def _gathered(came: queue.SimpleQueue[tuple[int, Channel]], ranks: list[int], timeout_s: float) -> list[Channel]:
    """Their channels in the order of `ranks`."""
    deadline, channels = time.monotonic() + timeout_s, {}
    while missing := [rank for rank in ranks if rank not in channels]:
        log.info("waits_for_ranks", extra={"missing": missing})
        try:
            rank, channel = came.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Unreachable(f"ranks {missing}", f"did not come within {timeout_s:g} s") from None
        channels[rank] = channel
    return [channels[rank] for rank in ranks]


def _end_with(rank: int, process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    log.error("rank_lost", extra={"rank": rank, "exit_code": code})
    os._exit(RANK_LOST)


@contextmanager
def _exit_without_them() -> Iterator[None]:
    """A rank of another machine is not our child: its end is seen when it is spoken to."""
    try:
        yield
    except OSError as error:
        log.error("rank_lost", extra={"reason": repr(error)})
        os._exit(RANK_LOST)
