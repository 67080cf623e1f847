"""The Ray actor beside a cell, or beside ranks of it on another node: starts them there, tells how they ended. Its death is theirs."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec

from qwengyre.cell.cell import CellAddress, CellSpec
from qwengyre.core.errors import ProcessFailed
from qwengyre.launchers.local import LocalLauncher, LocalLife
from qwengyre.rpc.processes import POLL_S, Supervised
from qwengyre.rpc.refusal import Refused, describe


class ServingRank(msgspec.Struct, frozen=True, tag=True):
    address: CellAddress
    node: str
    """Ray's id of the node."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The cell has let the ranks of this node in."""

    node: str


HostReply = ServingRank | Joined | Refused


class CellHost:
    """Becomes an actor in `launchers/on_ray.py`. Ray carries bytes to and fro; the records in them are `rpc`'s, so that errors arrive as they are."""

    def __init__(self, logs: str, start_timeout_s: float) -> None:
        import ray

        self._private = tempfile.TemporaryDirectory(prefix="qwengyre-")
        self._logs = Path(logs)
        self._node = ray.get_runtime_context().get_node_id()
        self._launcher = LocalLauncher(Path(self._private.name), self._logs, start_timeout_s, ray.util.get_node_ip_address())
        self._life: LocalLife | None = None
        self._ranks: list[Supervised] = []

    async def launch(self, name: str, spec: bytes) -> bytes:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            self._life = await self._launcher.launch(name, msgspec.msgpack.decode(spec, type=CellSpec))
        except ProcessFailed as error:
            return msgspec.msgpack.encode(describe(error))
        return msgspec.msgpack.encode(ServingRank(self._life.address, self._node))

    async def ranks_address(self, name: str) -> str:
        """Where the cell that is being launched here waits for ranks of other nodes; the driver has a deadline for it."""
        file = self._launcher.ranks_file(name)
        while not file.exists():
            await asyncio.sleep(POLL_S)
        return file.read_text()

    async def join(self, name: str, spec: bytes, ranks: list[int], at: str) -> bytes:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            self._ranks = await self._launcher.join(name, msgspec.msgpack.decode(spec, type=CellSpec), ranks, at)
        except ProcessFailed as error:
            return msgspec.msgpack.encode(describe(error))
        return msgspec.msgpack.encode(Joined(self._node))

    async def wait_end(self) -> str:
        if self._life is not None:
            return await self._life.wait_end()
        ends = [asyncio.create_task(rank.wait_exit(), name=rank.name) for rank in self._ranks]
        [first, *_], _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return f"{first.get_name()} ended with {first.result()}"

    async def stop(self) -> None:
        """Nothing to stop when the cell never served: it was killed."""
        if self._life is not None:
            await self._life.stop()
        for rank in self._ranks:
            await rank.stop()
