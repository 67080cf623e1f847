"""The cells as processes: started, watched, restarted. Says who is lost and who is back; decides nothing.

Standalone engines are processes of the same kind without a trainer, numbered after the cells.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn, TypeVar

import msgspec

from qwengyre.cell import api
from qwengyre.cell.cell import CellSpec
from qwengyre.core.errors import CellFailed
from qwengyre.core.ids import ServerId, numbered_server
from qwengyre.engines.api import EngineStats
from qwengyre.launchers.api import CellLauncher, CellLife
from qwengyre.rpc.heartbeat import HEARTBEATS_PER_ANSWER, wait_lost
from qwengyre.runtime.cell_client import CellClient
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.gateway_client import GatewayClient

log = logging.getLogger(__name__)
Reply = TypeVar("Reply", bound=msgspec.Struct)


class LiveCell:
    """One life of one cell."""

    def __init__(self, spec: CellSpec, process: CellLife, client: CellClient) -> None:
        self.spec, self.process, self.client = spec, process, client
        self.is_serving = True
        """The engine has memory and weights: a publish must reach it."""
        self.health: api.HealthReport | None = None
        self.watch: asyncio.Task[None] | None = None


class Fleet:
    """All cells and standalone engines of a run. `on_lost(number)` is called once per life that ends unasked."""

    def __init__(
        self,
        make_spec: Callable[[int, int], CellSpec],
        launcher: CellLauncher,
        config: RuntimeConfig,
        gateway: GatewayClient,
        num_cells: int,
    ) -> None:
        self._num_cells = num_cells
        self._make_spec, self._launcher = make_spec, launcher
        self._config, self._gateway = config, gateway
        self._incarnations: dict[int, int] = {}
        self.cells: dict[int, LiveCell] = {}
        self._retired: list[CellClient] = []
        """Of lost lives: closed at the end, since calls may still be failing on them."""
        self.on_lost: Callable[[int], None] = lambda cell: None
        self.say: Callable[[str], None] = lambda line: None
        """Tells the user why a process was lost."""

    def server(self, number: int) -> ServerId:
        return numbered_server(number, self._num_cells)

    async def start(self, cell: int) -> None:
        """Start a life of `cell` and tell the gateway where it serves. Raises ProcessFailed, NoRoom."""
        incarnation = self._incarnations.get(cell, -1) + 1
        self._incarnations[cell] = incarnation
        spec = self._make_spec(cell, incarnation)
        process = await self._launcher.launch(self.server(cell), spec)
        live = LiveCell(spec, process, CellClient(process.address, spec.secret))
        self.cells[cell] = live
        await self._gateway.add_server(self.server(cell), process.address.data, spec.secret)
        live.watch = asyncio.create_task(self._watch(cell, live), name=f"watch cell {cell}")

    async def call(self, cell: int, operation: api.Operation, expected: type[Reply], timeout_s: float | None = None) -> Reply:
        """One operation on the present life of `cell`. A cell that does not answer is reported lost before CellFailed is raised."""
        live = self.cells.get(cell)
        if live is None:
            raise CellFailed(cell, "is lost")
        try:
            return await live.client.call(operation, expected, timeout_s or self._config.operation_timeout_s)
        except CellFailed as error:
            self.report_lost(cell, live, error.reason)
            raise

    def give_up(self, cell: int, reason: str) -> NoReturn:
        """A cell that answers and yet cannot do its part: it is lost. Raises CellFailed."""
        live = self.cells.get(cell)
        if live is not None:
            self.report_lost(cell, live, reason)
        raise CellFailed(cell, reason)

    def report_lost(self, cell: int, live: LiveCell, reason: str) -> None:
        """Fence and kill this life; harmless for one that is no longer the present one."""
        if self.cells.get(cell) is not live:
            return
        self._retired.append(self.cells.pop(cell).client)
        log.error("cell_lost", extra={"cell": cell, "incarnation": live.spec.incarnation, "reason": reason})
        self.say(f"{self.server(cell)}: {reason}")
        live.process.kill()
        if live.watch is not None and live.watch is not asyncio.current_task():
            live.watch.cancel()
        self.on_lost(cell)

    async def _watch(self, cell: int, live: LiveCell) -> None:
        async def ping(timeout_s: float) -> None:
            live.health = await live.client.call(api.Health(), api.HealthReport, timeout_s)

        self.report_lost(cell, live, await wait_lost(live.process.wait_end(), ping, self._config.heartbeat_s))

    async def tell_gateway(self, gateway: int) -> None:
        """Where all cells serve, after gateway number `gateway` came back."""
        for cell, live in list(self.cells.items()):
            await self._gateway.add_server(self.server(cell), live.client.address.data, live.spec.secret, gateway=gateway)

    async def ping(self, cells: Iterable[int]) -> list[api.HealthReport]:
        """What those of `cells` say that answer within the deadline of a heartbeat. The others are lost when this returns."""
        deadline_s = self._config.heartbeat_s * HEARTBEATS_PER_ANSWER
        asked = (self.call(cell, api.Health(), api.HealthReport, deadline_s) for cell in cells)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, CellFailed):
                raise answer
        return [answer for answer in answers if isinstance(answer, api.HealthReport)]

    async def engine_stats(self) -> list[EngineStats]:
        """Of the present lives, at this moment."""
        return [report.engine for report in await self.ping(list(self.cells))]

    async def stop(self) -> None:
        lives, self.cells = list(self.cells.values()), {}
        for live in lives:
            if live.watch is not None:
                live.watch.cancel()
                with suppress(asyncio.CancelledError):
                    await live.watch
            live.client.close()
        for client in self._retired:
            client.close()
        await asyncio.gather(*(live.process.stop() for live in lives))
