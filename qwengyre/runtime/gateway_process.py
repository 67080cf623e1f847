"""The gateway as a supervised process: started again when it dies, with the same journal and the same keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from qwengyre.core.errors import QwenGyreError
from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.journal import is_in_use
from qwengyre.runtime.processes import Supervised, start_process

log = logging.getLogger(__name__)
LAST_LIFE_S = 15.0


class GatewayProcess:
    """`on_restarted()` is awaited whenever a new process serves: servers and routes must be told again."""

    def __init__(self, config: GatewayProcessConfig, private: Path, logs: Path, start_timeout_s: float) -> None:
        self._config, self._private, self._logs, self._timeout_s = config, private, logs, start_timeout_s
        self._child: Supervised | None = None
        self._watch: asyncio.Task | None = None
        self.port: int | None = None
        self.on_restarted: Callable[[], Awaitable[None]] | None = None

    async def start(self) -> None:
        await self._launch()
        # Harnesses know the port that was free then: a gateway that is started again takes the same one.
        self._config = msgspec.structs.replace(self._config, port=self.port)
        self._watch = asyncio.create_task(self._keep_alive(), name="gateway")

    async def _wait_for_the_last_life(self) -> None:
        """The gateway of a controller that was killed ends a moment after it; until then the journal is its own."""
        journal = Path(self._config.journal)
        deadline = asyncio.get_running_loop().time() + LAST_LIFE_S
        while journal.exists() and is_in_use(journal) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)

    async def _launch(self) -> None:
        await self._wait_for_the_last_life()
        (self._private / "gateway.json").write_bytes(msgspec.json.encode(self._config))
        ready = Path(self._config.ready_file or "")
        self._child = await start_process(
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
            try:
                await self._launch()
                if self.on_restarted is not None:
                    await self.on_restarted()
            except QwenGyreError:
                log.exception("gateway_not_restarted")  # the controller's next order to it fails, and ends the run
                raise

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self._child is not None:
            await self._child.stop()
