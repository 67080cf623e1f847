"""Cells as child processes on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from qwengyre.cell.cell import CellAddress, CellSpec
from qwengyre.cell.ranks.api import JoinOrders
from qwengyre.rpc.processes import Supervised, start_process


class LocalLife:
    def __init__(self, address: CellAddress, process: Supervised) -> None:
        self.address, self._process = address, process

    async def wait_end(self) -> str:
        return f"its process ended with {await self._process.wait_exit()}"

    def kill(self) -> None:
        self._process.kill()

    async def stop(self) -> None:
        await self._process.stop()


class LocalLauncher:
    """`private` is a folder that only this user can read, `logs` gets one file for each name; cells listen on `host`."""

    def __init__(self, private: Path, logs: Path, start_timeout_s: float, host: str = "127.0.0.1") -> None:
        self._private, self._logs, self._start_timeout_s, self._host = private, logs, start_timeout_s, host

    async def launch(self, name: str, spec: CellSpec) -> LocalLife:
        ready_file = self._private / f"{name}.ready"
        ranks_file = self.ranks_file(name)
        ranks_file.unlink(missing_ok=True)
        spec = msgspec.structs.replace(
            spec,
            host=self._host,
            ready_file=str(ready_file),
            ranks_file=str(ranks_file),
            start_timeout_s=self._start_timeout_s,
        )
        process = await self._start("qwengyre.cell.cell", name, spec, spec.threads)
        return LocalLife(msgspec.json.decode(ready_file.read_bytes(), type=CellAddress), process)

    def ranks_file(self, name: str) -> Path:
        """Where a cell that was launched here says that it waits for ranks of other machines."""
        return self._private / f"{name}.ranks"

    async def join(self, name: str, spec: CellSpec, ranks: Sequence[int], at: str) -> list[Supervised]:
        """Processes of this machine for `ranks` of a cell that waits for them `at` another. Raises ProcessFailed."""
        return list(await asyncio.gather(*(self._join(f"{name}-rank-{rank}", spec, rank, at) for rank in ranks)))

    async def _join(self, name: str, spec: CellSpec, rank: int, at: str) -> Supervised:
        ready_file = self._private / f"{name}.ready"
        orders = JoinOrders(rank, at, spec.secret, self._host, self._start_timeout_s, str(ready_file), spec.tls)
        return await self._start("qwengyre.cell.ranks.process", name, orders, spec.threads)

    async def _start(self, module: str, name: str, orders: CellSpec | JoinOrders, threads: int) -> Supervised:
        """A process that reads its orders from a file for this user only."""
        file = self._private / f"{name}.json"
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(orders))
        return await start_process(
            module,
            [str(file)],
            self._logs / f"{name}.log",
            Path(orders.ready_file),
            env={"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            timeout_s=self._start_timeout_s,
        )

    async def close(self) -> None:
        """Nothing is the launcher's own."""
