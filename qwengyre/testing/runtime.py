"""What a controller drives, without processes: cells and a gateway in this one, and a fleet of cells that only answer.

Each passes the contract of what it stands for: `tests/contract/launchers.py`, `tests/contract/test_fleet.py`,
`tests/contract/test_gateway_client.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NoReturn, TypeVar

import msgspec

from qwengyre.cell import api
from qwengyre.cell.cell import CellAddress, CellSpec, serving
from qwengyre.core.errors import CellFailed, ConfigError, ProcessFailed, TrainerError, UnknownExecution
from qwengyre.core.ids import ExecutionId, ServerId, numbered_server
from qwengyre.engines.api import Capacity, EngineStats
from qwengyre.gateway.control_api import ClosedExecution, GatewayReport, Moved, OpenedExecution, OpenExecution
from qwengyre.gateway.stats import GatewayStats, SessionCounts
from qwengyre.trajectory.records import Opened
from qwengyre.transfer.api import Exposure

Reply = TypeVar("Reply", bound=msgspec.Struct)
Answer = Callable[[int, Any], Awaitable[msgspec.Struct]]
"""Of a cell, by number, to one kind of operation."""


class FakeLife:
    """Implements `launchers.api.CellLife`, for a cell in this process."""

    def __init__(self, address: CellAddress, cell: AsyncExitStack) -> None:
        self.address, self._cell = address, cell
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._closing: asyncio.Task[None] | None = None

    async def wait_end(self) -> str:
        return await asyncio.shield(self._ended)

    def end(self, reason: str) -> None:
        """Unasked, as by a crash."""
        if self._closing is None:
            self._ended.set_result(reason)
            self._closing = asyncio.get_running_loop().create_task(self._cell.aclose())

    def kill(self) -> None:
        self.end("killed")

    async def stop(self) -> None:
        self.end("stopped")
        assert self._closing is not None
        await self._closing


class FakeLauncher:
    """Implements `launchers.api.CellLauncher`: real cells, on this event loop. Meant for the engine `paced`, which needs no torch."""

    def __init__(self) -> None:
        self.lives: list[FakeLife] = []

    async def launch(self, name: str, spec: CellSpec) -> FakeLife:
        cell = AsyncExitStack()
        try:
            address = await cell.enter_async_context(serving(msgspec.structs.replace(spec, host="127.0.0.1")))
        except Exception as error:  # a process of its own would end with it
            raise ProcessFailed(name, "ended with exit code 1", log_path="none", tail=str(error)) from error
        self.lives.append(FakeLife(address, cell))
        return self.lives[-1]

    async def close(self) -> None:
        """Every life that is left ends."""
        for life in self.lives:
            await life.stop()


class FakeCell:
    """What `FakeFleet` knows of a cell."""

    is_serving = True


class FakeFleet:
    """Has the interface of `runtime.fleet.Fleet`. Cells answer by `answers`: kind of operation -> function; all that is left works."""

    def __init__(self, num_cells: int, num_standalone: int = 0) -> None:
        self._num_cells = num_cells
        self.cells = {number: FakeCell() for number in range(num_cells + num_standalone)}
        self.answers: dict[type, Answer] = {}
        self.calls: list[tuple[int, Any]] = []
        """(cell, operation) of all that was asked."""
        self.started: list[int] = []
        self.silent: set[int] = set()
        """Cells that answer no heartbeat: lost at the next `ping`."""
        self.on_lost: Callable[[int], None] = lambda cell: None
        self.say: Callable[[str], None] = lambda line: None

    def server(self, number: int) -> ServerId:
        return numbered_server(number, self._num_cells)

    async def start(self, cell: int) -> None:
        self.started.append(cell)
        self.cells[cell] = FakeCell()

    async def call(self, cell: int, operation: api.Operation, expected: type[Reply], timeout_s: float | None = None) -> Reply:
        if cell not in self.cells:
            raise CellFailed(cell, "is lost")
        self.calls.append((cell, operation))
        try:
            reply = await self._answer(cell, operation)
        except CellFailed as error:
            self.lose(cell, error.reason)
            raise
        assert isinstance(reply, expected), f"{type(operation).__name__} is answered by a {type(reply).__name__}"
        return reply

    async def _answer(self, cell: int, operation: api.Operation) -> msgspec.Struct:
        if (answer := self.answers.get(type(operation))) is not None:
            return await answer(cell, operation)
        match operation:
            case api.Health():
                return api.HealthReport(Capacity(0, 0), EngineStats(0, 0, 0, 0, 0, 0.0))
            case api.ExposeSnapshot() | api.ExposeFile():
                return api.Exposed(Exposure("shm", f"weights-{operation.version}", (), operation.version, 0, 0))
            case api.HoldSnapshot():
                return api.Exposed(msgspec.structs.replace(operation.snapshot, location=f"held by {cell}"))
            case api.OfferStore():
                return api.Offered(f"10.0.0.{cell}:7")
            case api.EnterTraining() if cell >= self._num_cells:
                raise TrainerError("a standalone engine has no trainer: EnterTraining is for a cell")
        return api.Timed()

    def give_up(self, cell: int, reason: str) -> NoReturn:
        self.lose(cell, reason)
        raise CellFailed(cell, reason)

    def lose(self, cell: int, reason: str = "died") -> CellFailed:
        """The error that a caller then meets."""
        if self.cells.pop(cell, None) is not None:
            self.say(f"{self.server(cell)}: {reason}")
            self.on_lost(cell)
        return CellFailed(cell, reason)

    async def ping(self, cells: Iterable[int]) -> list[api.HealthReport]:
        found = []
        for cell in list(cells):
            if cell in self.silent:
                self.lose(cell, "it missed its heartbeats")
            elif cell in self.cells:
                found.append(await self.call(cell, api.Health(), api.HealthReport))
        return found

    async def engine_stats(self) -> list[EngineStats]:
        return [report.engine for report in await self.ping(self.cells)]

    async def tell_gateway(self, gateway: int) -> None: ...

    async def stop(self) -> None:
        self.cells.clear()

    def told(self, kind: type) -> list[int]:
        """Which cells were asked for operations of this kind, in order."""
        return [cell for cell, operation in self.calls if isinstance(operation, kind)]


class FakeGateway:
    """Has the interface of `runtime.gateway_client.GatewayClient`. No call ever comes."""

    def __init__(self) -> None:
        self.open_executions: dict[ExecutionId, OpenExecution] = {}
        self.closed: dict[ExecutionId, ClosedExecution] = {}
        self.routes: dict[ExecutionId, ServerId | None] = {}
        """Of the executions that are open."""
        self.servers: dict[ServerId, str] = {}
        self._keys: dict[tuple[ExecutionId, int], OpenedExecution] = {}

    async def open(self, asked: OpenExecution) -> OpenedExecution:
        known = self.open_executions.get(asked.execution)
        if known is not None and known.attempt > asked.attempt:
            raise ConfigError(f"{asked.execution} is at attempt {known.attempt} already", key="attempt")
        if known is None or known.attempt < asked.attempt:
            self.open_executions[asked.execution] = asked
            self._keys[asked.execution, asked.attempt] = OpenedExecution(secrets.token_hex(8), f"/e/{secrets.token_hex(8)}/v1")
        if asked.server is not None or known is None:
            self.routes[asked.execution] = asked.server
        return self._keys[asked.execution, asked.attempt]

    async def close_execution(self, execution: ExecutionId) -> ClosedExecution:
        if (known := self.open_executions.pop(execution, None)) is not None:
            self.routes.pop(execution, None)
            same = {name: getattr(known, name) for name in Opened.__struct_fields__ if name != "session"}
            self.closed[execution] = ClosedExecution(Opened(session=len(self.closed), **same), [], SessionCounts())
        if execution not in self.closed:
            raise UnknownExecution(execution)
        return self.closed[execution]

    def number_of(self, execution: ExecutionId) -> int:
        return 0

    async def add_server(self, server: ServerId, address: str, secret: bytes, *, gateway: int | None = None) -> None:
        self.servers[server] = address

    async def remove_server(self, server: ServerId) -> None:
        self.servers.pop(server, None)

    async def route(self, routes: Mapping[ExecutionId, ServerId | None]) -> None:
        self.routes |= {execution: server for execution, server in routes.items() if execution in self.open_executions}

    async def move(self, source: ServerId, moves: Mapping[ExecutionId, ServerId | None]) -> Moved:
        await self.route(moves)
        return Moved(calls_moved=0, contexts_moved=0, tokens_moved=0, tokens_recomputed=0, kv_bytes=0, seconds=0.0)

    async def report(self) -> GatewayReport:
        return GatewayReport(GatewayStats())

    async def ping(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...
