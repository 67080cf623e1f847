"""The Ray actor beside a cell: starts it on its node, tells how it ended. Its death is the cell's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from qwengyre.runtime.cell import CellAddress, CellSpec
from qwengyre.runtime.launchers.local import LocalLauncher
from qwengyre.runtime.processes import ProcessFailed, log_tail


class NotServing(msgspec.Struct, frozen=True, tag=True):
    """Why the cell did not come up, and the end of its log."""

    reason: str
    log_tail: str


class Serving(msgspec.Struct, frozen=True, tag=True):
    address: CellAddress
    node: str
    """Ray's id of the node."""


Launched = Serving | NotServing


class CellHost:
    """Becomes an actor in `launchers/on_ray.py`. What crosses to the driver is JSON: our errors do not survive pickling."""

    def __init__(self, logs: str, start_timeout_s: float) -> None:
        import ray

        self._private = tempfile.TemporaryDirectory(prefix="qwengyre-")
        self._logs = Path(logs)
        self._node = ray.get_runtime_context().get_node_id()
        self._launcher = LocalLauncher(Path(self._private.name), self._logs, start_timeout_s, ray.util.get_node_ip_address())
        self._life = None

    async def launch(self, name: str, spec: bytes) -> bytes:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            self._life = await self._launcher.launch(name, msgspec.json.decode(spec, type=CellSpec))
        except ProcessFailed as error:
            return msgspec.json.encode(NotServing(error.reason, log_tail(error.log_path)))
        return msgspec.json.encode(Serving(self._life.address, self._node))

    async def wait_end(self) -> str:
        return await self._life.wait_end()

    async def stop(self) -> None:
        """Nothing to stop when the cell never served: it was killed."""
        if self._life is not None:
            await self._life.stop()
