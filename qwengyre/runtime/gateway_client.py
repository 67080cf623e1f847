"""The controller's end of the wire of its gateways (gateway/control_api.py), a Unix socket each."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from qwengyre.core.errors import GatewayFailed, Unreachable
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.gateway.control_api import (
    AddServer,
    ClosedExecution,
    CloseExecution,
    GatewayReport,
    MoveCalls,
    Moved,
    OpenedExecution,
    OpenExecution,
    Ping,
    RemoveServer,
    ReportCounts,
    SetRoutes,
)
from qwengyre.rpc.client import Client
from qwengyre.rpc.server import Done

Reply = TypeVar("Reply", bound=msgspec.Struct)
Value = TypeVar("Value")
ASK_AGAIN_S = 0.1  # a new gateway is up within seconds


def gateway_of(execution: ExecutionId, num_gateways: int) -> int:
    """Which of the gateways of a run has an execution: the same in every life and on every machine.

    >>> [gateway_of(ExecutionId(f"e000001-{number}"), 2) for number in range(8)].count(0)
    4
    """
    return zlib.crc32(execution.encode()) % num_gateways


def summed(parts: Sequence[Reply]) -> Reply:
    """Counts of several gateways as one: sums, but of `seconds` that pass side by side the longest."""
    names = parts[0].__struct_fields__
    return type(parts[0])(**{name: (max if name == "seconds" else sum)(getattr(part, name) for part in parts) for name in names})


class GatewayClient:
    """Every request can be asked twice, and is asked again while a gateway restarts, until `timeout_s`.

    Of several gateways each has its own executions; servers are told to all. Raises GatewayFailed then, and what a gateway refused with.
    """

    def __init__(self, sockets: Sequence[Path], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clients = [Client(f"unix:{socket}", None) for socket in sockets]

    def number_of(self, execution: ExecutionId) -> int:
        """Of the gateway that has this execution, in all lives of a run."""
        return gateway_of(execution, len(self._clients))

    async def open(self, asked: OpenExecution) -> OpenedExecution:
        return await self._ask(self.number_of(asked.execution), asked, OpenedExecution)

    async def close_execution(self, execution: ExecutionId) -> ClosedExecution:
        """What it said; its key dies. Answers the same when asked again."""
        return await self._ask(self.number_of(execution), CloseExecution(execution), ClosedExecution)

    async def add_server(self, server: ServerId, address: str, secret: bytes, *, gateway: int | None = None) -> None:
        """To all, or only to gateway number `gateway`: the others' calls go on undisturbed."""
        await self._ask_all(AddServer(server, address, secret), Done, gateway)

    async def remove_server(self, server: ServerId) -> None:
        await self._ask_all(RemoveServer(server), Done)

    async def route(self, routes: Mapping[ExecutionId, ServerId | None]) -> None:
        shares = self._shares(routes)
        await asyncio.gather(*(self._ask(number, SetRoutes(share), Done) for number, share in shares.items()))

    async def move(self, source: ServerId, moves: Mapping[ExecutionId, ServerId | None]) -> Moved:
        """KV that was not moved within half of `timeout_s` is computed again."""
        shares = self._shares(moves) or {0: {}}
        asked = {number: MoveCalls(source, share, self._timeout_s / 2) for number, share in shares.items()}
        return summed(await asyncio.gather(*(self._ask(number, one, Moved) for number, one in asked.items())))

    async def report(self) -> GatewayReport:
        """The counts of all gateways together."""
        reports = await self._ask_all(ReportCounts(), GatewayReport)
        return GatewayReport(summed([report.stats for report in reports]))

    async def ping(self, timeout_s: float) -> None:
        """Once. Raises Unreachable."""
        await asyncio.gather(*(client.call(Ping(), Done, timeout_s) for client in self._clients))

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _shares(self, by_execution: Mapping[ExecutionId, Value]) -> dict[int, dict[ExecutionId, Value]]:
        """By number of the gateway."""
        shares: dict[int, dict[ExecutionId, Value]] = {}
        for execution, value in by_execution.items():
            shares.setdefault(self.number_of(execution), {})[execution] = value
        return shares

    async def _ask_all(self, request: msgspec.Struct, expected: type[Reply], only: int | None = None) -> list[Reply]:
        numbers = range(len(self._clients)) if only is None else (only,)
        return await asyncio.gather(*(self._ask(number, request, expected) for number in numbers))

    async def _ask(self, gateway: int, request: msgspec.Struct, expected: type[Reply]) -> Reply:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while True:
            try:
                return await self._clients[gateway].call(
                    request, expected, max(ASK_AGAIN_S, deadline - clock()), said_by="gateway: "
                )
            except Unreachable as error:
                if clock() > deadline:
                    name = type(request).__name__
                    raise GatewayFailed(
                        f"gateway: {name} was not answered within {self._timeout_s:g} s: {error.reason}"
                    ) from error
                await asyncio.sleep(ASK_AGAIN_S)
