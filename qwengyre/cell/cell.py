"""One cell: a process with an engine and a trainer. `python -m qwengyre.cell.cell SPEC.json`.

The event loop serves both wires; the engine has its own thread, the trainer one more. Only one of the
two holds memory and computes at a time. Never decides anything: the controller's scheduler does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from qwengyre.cell import api
from qwengyre.cell.home import Home, RanksElsewhere
from qwengyre.cell.kinds import CellParts, build_parts
from qwengyre.core.errors import CellFailed, EngineError, QwenGyreError, TrainerError, TransferError
from qwengyre.engines.api import CellEngine
from qwengyre.engines.config import EngineConfig
from qwengyre.hooks.load import HookRef
from qwengyre.rpc import tls
from qwengyre.rpc.processes import announce
from qwengyre.rpc.server import RpcServer, Service
from qwengyre.rpc.store import KeyStore
from qwengyre.rpc.tls import TlsConfig
from qwengyre.telemetry.folder import snapshot_file
from qwengyre.telemetry.log_lines import log_to
from qwengyre.trainer.api import CellTrainer, Membership
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.transports import TransportPlace
from qwengyre.transfer.tree import hold, let_go

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("qwengyre.cell")
Result = TypeVar("Result")
OF_A_STANDALONE_ENGINE = frozenset({api.UpdateWeights, api.ExposeFile, api.HoldSnapshot, api.Health})
"""What needs no trainer."""


class CellSpec(msgspec.Struct, frozen=True):
    """Everything a cell needs to start; written by the launcher, readable by its owner only."""

    cell: int
    incarnation: int
    """Which life of the cell this process is, from 0; requests for another one are refused."""
    model_dir: str
    segment_prefix: str
    secret: bytes
    """The run's: both ends of every wire prove that they know it (`rpc/hello.py`)."""
    threads: int
    engine: EngineConfig
    trainer: TrainerConfig
    collective_timeout_s: float
    has_trainer: bool
    """False for a standalone engine: it only ever serves."""
    transfer: TransferConfig
    token_loss: HookRef | None = None
    """`hooks.token_loss` of the run."""
    tls: TlsConfig = TlsConfig()
    """The run's."""
    host: str = ""
    """Address that both wires and the transfers listen on; filled in by the launcher."""
    ready_file: str = ""
    """Where the cell writes its `CellAddress` when it serves; filled in by the launcher."""
    ranks_here: int = 0
    """How many of the `trainer.ranks` run on this host (0: all); filled in by the launcher, which starts the others."""
    ranks_file: str = ""
    """Where the cell writes the address at which it waits for those others."""
    start_timeout_s: float = 120.0
    """Longest wait for them; filled in by the launcher."""


class CellAddress(msgspec.Struct, frozen=True):
    cell: int
    incarnation: int
    control: str
    """Where it takes requests of `cell/api.py`."""
    data: str
    """Where it serves its engine (`engines/wire.py`)."""
    pid: int


class CellProcess:
    """Owns the engine and the trainer, and answers operations one at a time per kind."""

    def __init__(self, spec: CellSpec, build: Callable[..., CellParts] = build_parts) -> None:
        self.spec = spec
        place = TransportPlace(spec.transfer, spec.segment_prefix, spec.host)
        self.transport = place.open()
        trainer = spec.trainer if spec.has_trainer else None
        elsewhere = RanksElsewhere(spec.ranks_here, spec.ranks_file, spec.start_timeout_s)
        home = Home(self.transport, place, spec.threads, spec.secret, elsewhere, spec.token_loss)
        self.engine, self._trainer = build(Path(spec.model_dir), spec.engine, trainer, home)
        if self._trainer is not None:
            self._trainer.offload()
        self._store: KeyStore | None = None
        """In which the members of the next steps find each other, if this cell is the first of them."""
        self.published: list[Exposure] = []
        self._held: dict[bool, Exposure] = {}
        """Snapshots that are served on: the published one, by True, and that of a step, by False."""
        self._trainer_thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._operations: dict[type, Callable[[Any], Awaitable[msgspec.Struct]]] = {
            api.OfferStore: self.offer_store,
            api.ConnectMembers: self.connect_members,
            api.EnterTraining: self.enter_training,
            api.EnterRollout: self.enter_rollout,
            api.BeginStep: self.begin_step,
            api.Compute: self.compute,
            api.Reduce: self.reduce,
            api.Apply: self.apply,
            api.ExposeSnapshot: self.expose_snapshot,
            api.ExposeFile: self.expose_file,
            api.HoldSnapshot: self.hold_snapshot,
            api.UpdateWeights: self.update_weights,
            api.SaveCheckpoint: self.save_checkpoint,
            api.LoadCheckpoint: self.load_checkpoint,
            api.SaveSnapshot: self.save_snapshot,
            api.Audit: self.audit,
            api.Health: self.health,
        }

    async def handle(self, asked: api.CellRequest) -> msgspec.Struct:
        """Raises CellFailed for another incarnation: who asks does not know yet that it was replaced, or has not heard of a loss."""
        if asked.incarnation != self.spec.incarnation:
            own = self.spec.incarnation
            raise CellFailed(
                self.spec.cell, f"a request for incarnation {asked.incarnation}, and this process is incarnation {own}"
            )
        if self._trainer is None and type(asked.operation) not in OF_A_STANDALONE_ENGINE:
            name = type(asked.operation).__name__
            raise TrainerError(f"a standalone engine has no trainer: {name} is for a cell")
        return await self._operations[type(asked.operation)](asked.operation)

    @property
    def trainer(self) -> CellTrainer:
        assert self._trainer is not None, "what needs a trainer is refused before"
        return self._trainer

    @property
    def own_engine(self) -> CellEngine:
        """Raises EngineError when the cell has no say over the engine's weights and memory."""
        if not isinstance(self.engine, CellEngine):
            raise EngineError("the weights of this engine are elsewhere: only a training engine takes others")
        return self.engine

    async def on_trainer(self, job: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._trainer_thread, job)

    async def offer_store(self, op: api.OfferStore) -> api.Offered:
        """A new one each time: who waits in the one before hears that it is over."""
        if self._store is not None:
            self._store.close()
        self._store = KeyStore(self.spec.host, self.spec.secret)
        return api.Offered(self._store.address)

    async def connect_members(self, op: api.ConnectMembers) -> api.Timed:
        membership = Membership(
            number=op.membership,
            rank=op.cell_order.index(self.spec.cell),
            world=len(op.cell_order),
            store=op.store,
            timeout_s=self.spec.collective_timeout_s,
        )
        started = time.monotonic()
        await self.on_trainer(lambda: self.trainer.connect(membership))
        return api.Timed({"connect": time.monotonic() - started})

    async def enter_training(self, op: api.EnterTraining) -> api.Timed:
        phases_s: dict[str, float] = {}
        await self._phase("offload_engine", self.own_engine.offload(), phases_s)
        await self._phase("restore_trainer", self.on_trainer(self.trainer.restore), phases_s)
        return api.Timed(phases_s)

    async def enter_rollout(self, op: api.EnterRollout) -> api.Timed:
        phases_s: dict[str, float] = {}
        await self._phase("offload_trainer", self.on_trainer(self.trainer.offload), phases_s)
        await self._phase("restore_engine", self.own_engine.restore(op.snapshot, op.version), phases_s)
        return api.Timed(phases_s)

    async def _phase(self, name: str, job: Awaitable[None], phases_s: dict[str, float]) -> None:
        """One phase of a role switch. Raises CellFailed when it fails: this life is between two roles and must end.

        A snapshot that could not be read is not such a failure: its TransferError asks for another one, and the phase again.
        """
        started = time.monotonic()
        try:
            await job
        except TransferError:
            raise
        except QwenGyreError as error:
            raise CellFailed(self.spec.cell, f"phase {name} of its role switch failed: {error}") from error
        phases_s[name] = time.monotonic() - started

    async def begin_step(self, op: api.BeginStep) -> api.Timed:
        def begin() -> None:
            if op.snapshot is not None:
                self.trainer.pull(op.snapshot)
            self.trainer.begin_step(op.step)

        started = time.monotonic()
        await self.on_trainer(begin)
        return api.Timed({"join": time.monotonic() - started})

    async def compute(self, op: api.Compute) -> api.Computed:
        return api.Computed(await self.on_trainer(lambda: self.trainer.compute(op.micro_step)))

    async def reduce(self, op: api.Reduce) -> api.Timed:
        started = time.monotonic()
        await self.on_trainer(lambda: self.trainer.reduce(op.num_members))
        return api.Timed({"reduce": time.monotonic() - started})

    async def apply(self, op: api.Apply) -> api.Applied:
        return api.Applied(await self.on_trainer(lambda: self.trainer.apply(op.num_executions)))

    async def expose_snapshot(self, op: api.ExposeSnapshot) -> api.Exposed:
        if not op.is_publish:
            return api.Exposed(await self.on_trainer(lambda: self.trainer.expose(op.version, self.spec.incarnation)))
        return api.Exposed(await self.on_trainer(lambda: self._publish(self.trainer.publishable(), op.version)))

    def _publish(self, arrays: dict[str, np.ndarray], version: int) -> Exposure:
        """The last two published snapshots stay readable."""
        self.published.append(self.transport.expose(arrays, version=version, incarnation=self.spec.incarnation))
        while len(self.published) > 2:
            self.transport.release(self.published.pop(0))
        return self.published[-1]

    async def expose_file(self, op: api.ExposeFile) -> api.Exposed:
        def expose() -> Exposure:
            from qwengyre.trainer.checkpoint import read_published

            return self._publish(read_published(Path(op.path)), op.version)

        return api.Exposed(await self.on_trainer(expose))

    async def hold_snapshot(self, op: api.HoldSnapshot) -> api.Exposed:
        def held() -> Exposure:
            if (before := self._held.pop(op.is_publish, None)) is not None:
                let_go(self.transport, before)
            made = self._held[op.is_publish] = hold(self.transport, op.snapshot)
            return made

        return api.Exposed(await self.on_trainer(held))

    async def update_weights(self, op: api.UpdateWeights) -> api.Timed:
        started = time.monotonic()
        engine = self.own_engine
        await engine.pause("keep")
        try:
            await engine.update_weights(op.snapshot, op.version)
        finally:
            await engine.resume()
        return api.Timed({"update_weights": time.monotonic() - started})

    async def save_checkpoint(self, op: api.SaveCheckpoint) -> api.Timed:
        extra = {"journal_position": op.journal_position}
        started = time.monotonic()
        await self.on_trainer(lambda: self.trainer.save_checkpoint(Path(op.directory), op.step, Path(op.files), extra))
        return api.Timed({"checkpoint": time.monotonic() - started})

    async def load_checkpoint(self, op: api.LoadCheckpoint) -> api.Timed:
        await self.on_trainer(lambda: self.trainer.load_checkpoint(Path(op.directory)))
        return api.Timed()

    async def save_snapshot(self, op: api.SaveSnapshot) -> api.Timed:
        await self.on_trainer(lambda: self.trainer.save_weights(snapshot_file(Path(op.directory), op.version)))
        return api.Timed()

    async def audit(self, op: api.Audit) -> api.Audited:
        return api.Audited(await self.on_trainer(lambda: self.trainer.audit(op.micro_steps, Path(op.snapshots_dir))))

    async def health(self, op: api.Health) -> api.HealthReport:
        """Raises CellFailed when the engine has ended by itself: calls would wait at this cell for nothing."""
        stats = self.engine.stats()
        if stats.failure:
            raise CellFailed(self.spec.cell, stats.failure)
        return api.HealthReport(self.engine.capacity(), stats)

    async def close(self) -> None:
        await self.engine.close()
        if self._store is not None:
            self._store.close()
        self._trainer_thread.shutdown(wait=False, cancel_futures=True)
        self.transport.close()


@asynccontextmanager
async def serving(spec: CellSpec) -> AsyncIterator[CellAddress]:
    """A cell that serves from this process as long as the context lasts."""
    from qwengyre.engines.server import EngineServer

    cell = CellProcess(spec)
    engine_server = EngineServer(cell.engine, secret=spec.secret)
    control = RpcServer(spec.secret, lambda: Service({api.CellRequest: cell.handle}))
    try:
        data = await engine_server.serve(f"tcp://{spec.host}:0")
        yield CellAddress(spec.cell, spec.incarnation, await control.listen(f"tcp://{spec.host}:0"), data, os.getpid())
    finally:
        await control.close()
        await engine_server.close()
        await cell.close()


async def serve(spec: CellSpec) -> None:
    stop = asyncio.Event()
    async with serving(spec) as address:
        announce(Path(spec.ready_file), msgspec.json.encode(address))
        log.info("cell_serves", extra={"cell": spec.cell, "incarnation": spec.incarnation})
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=CellSpec)
    log_to(None)
    try:
        tls.use(spec.tls)
        asyncio.run(serve(spec))
    except QwenGyreError as error:  # a model or a setting that cannot be used: the controller shows the end of this log
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
