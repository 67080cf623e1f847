"""The gateway as a supervised process: started again when it dies, with the same journal and the same keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.runtime.processes import Supervised, start_process

log = logging.getLogger(__name__)


class GatewayProcess:
    """`on_restarted()` is awaited whenever a new process serves: servers and routes must be told again."""

    def __init__(self, config: GatewayProcessConfig, private: Path, logs: Path, start_timeout_s: float) -> None:
        self._config, self._private, self._logs, self._timeout_s = config, private, logs, start_timeout_s
        self._child: Supervised | None = None
        self._watch: asyncio.Task | None = None
        self.port: int | None = None
        self.on_restarted: Callable[[], Awaitable[None]] | None = None

    async def start(self) -> None:
        file = self._private / "gateway.json"
        file.write_bytes(msgspec.json.encode(self._config))
        await self._launch()
        self._watch = asyncio.create_task(self._keep_alive(), name="gateway")

    async def _launch(self) -> None:
        ready = Path(self._config.ready_file or "")
        self._child = await start_process(
            "gateway",
            "qwengyre.gateway",
            ["--config", str(self._private / "gateway.json")],
            self._logs / "gateway.log",
            ready,
            env={"OMP_NUM_THREADS": "1"},
            timeout_s=self._timeout_s,
        )
        self.port = msgspec.json.decode(ready.read_bytes()).get("port")

    async def _keep_alive(self) -> None:
        while True:
            code = await self._child.wait_exit()
            log.error("gateway_lost", extra={"exit_code": code})
            await self._launch()
            if self.on_restarted is not None:
                await self.on_restarted()

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self._child is not None:
            await self._child.stop()
