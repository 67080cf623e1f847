"""Cells as child processes on this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from qwengyre.runtime.cell import CellAddress, CellSpec
from qwengyre.runtime.processes import Supervised, start_process


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
        spec = msgspec.structs.replace(spec, host=self._host, ready_file=str(ready_file))
        spec_file = self._private / f"{name}.json"
        spec_file.touch(mode=0o600)
        spec_file.write_bytes(msgspec.json.encode(spec))
        process = await start_process(
            "qwengyre.runtime.cell",
            [str(spec_file)],
            self._logs / f"{name}.log",
            ready_file,
            env={"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)},
            timeout_s=self._start_timeout_s,
        )
        return LocalLife(msgspec.json.decode(ready_file.read_bytes(), type=CellAddress), process)

    async def close(self) -> None:
        """Nothing is the launcher's own."""
