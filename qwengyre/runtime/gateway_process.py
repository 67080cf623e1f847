"""A gateway as a supervised process: started again when it dies or stalls, with the same journal and the same keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.journal import is_in_use
from qwengyre.rpc.heartbeat import wait_lost
from qwengyre.rpc.processes import Supervised, start_process
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.runtime.give_up import Losses
from qwengyre.telemetry.folder import part_name

log = logging.getLogger(__name__)
LAST_LIFE_S = 15.0  # it ends a moment after its controller; this covers a machine under load


class GatewayProcess:
    """`on_restarted()` runs whenever a new process serves: servers and routes must be told again."""

    def __init__(self, config: GatewayProcessConfig, private: Path, logs: Path, runtime: RuntimeConfig) -> None:
        self._config, self._private, self._logs, self._runtime = config, private, logs, runtime
        self.number = config.number
        self._losses = Losses()
        self._child: Supervised | None = None
        self._watch: asyncio.Task[None] | None = None
        self.port: int | None = None
        self.on_restarted: Callable[[], Coroutine[Any, Any, None]] | None = None

    @property
    def control_socket(self) -> Path:
        return Path(self._config.control_socket)

    @property
    def harness_socket(self) -> str:
        """Empty for a gateway without one."""
        return self._config.harness_socket or ""

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
        settings = self._private / f"gateway-{self.number}.json"
        settings.write_bytes(msgspec.json.encode(self._config))
        ready = Path(self._config.ready_file or "")
        self._child = await start_process(
            "qwengyre.gateway",
            ["--config", str(settings)],
            self._logs / part_name("gateway.log", self.number),
            ready,
            env={"OMP_NUM_THREADS": "1"},
            timeout_s=self._runtime.start_timeout_s,
        )
        self.port = msgspec.json.decode(ready.read_bytes()).get("port")

    async def _keep_alive(self) -> None:
        """Raises ProcessFailed, ProcessGaveUp when the gateway cannot be kept alive, among the errors of a group.

        It is watched while it is told again: requests wait for a gateway that died meanwhile, so another one has to come.
        """
        async with asyncio.TaskGroup() as telling:
            while True:
                reason = await self._wait_lost()
                log.error("gateway_lost", extra={"gateway": self.number, "reason": reason})
                self._losses.see(f"gateway {self.number}", asyncio.get_running_loop().time())
                await self._launch()
                if self.on_restarted is not None:
                    telling.create_task(self.on_restarted())

    async def _wait_lost(self) -> str:
        """Until the process has ended, or is killed because it does not answer; the reason."""
        client, child = GatewayClient([self.control_socket], self._runtime.heartbeat_s), self._child
        assert child is not None, "launched before it is watched"

        async def ended() -> str:
            return f"its process ended with {await child.wait_exit()}"

        try:
            reason = await wait_lost(ended(), client.ping, self._runtime.heartbeat_s)
        finally:
            client.close()
        child.kill()
        await child.wait_exit()
        return reason

    async def wait_failed(self) -> NoReturn:
        """Until this gateway is lost for good; raises what `_keep_alive` does."""
        assert self._watch is not None, "started before anybody waits for it"
        await asyncio.shield(self._watch)
        raise AssertionError("a gateway is kept alive until it is stopped or cannot be")

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._child is not None:
            await self._child.stop()
