"""The controller's end of the gateway's wire (gateway/control_api.py), a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
ASK_AGAIN_S = 0.1


class GatewayClient:
    """Every request can be asked twice, and is asked again while the gateway restarts, until `timeout_s`.

    Raises GatewayFailed then, and what the gateway refused with.
    """

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client = Client(f"unix:{socket}", None)

    async def open(self, asked: OpenExecution) -> OpenedExecution:
        return await self._ask(asked, OpenedExecution)

    async def close_execution(self, execution: ExecutionId) -> ClosedExecution:
        """What it said; its key dies. Answers the same when asked again."""
        return await self._ask(CloseExecution(execution), ClosedExecution)

    async def add_server(self, server: ServerId, address: str, secret: bytes) -> None:
        await self._ask(AddServer(server, address, secret), Done)

    async def remove_server(self, server: ServerId) -> None:
        await self._ask(RemoveServer(server), Done)

    async def route(self, routes: Mapping[ExecutionId, ServerId | None]) -> None:
        await self._ask(SetRoutes(dict(routes)), Done)

    async def move(self, source: ServerId, moves: Mapping[ExecutionId, ServerId | None]) -> Moved:
        """KV that was not moved within half of `timeout_s` is computed again."""
        return await self._ask(MoveCalls(source, dict(moves), self._timeout_s / 2), Moved)

    async def report(self) -> GatewayReport:
        return await self._ask(ReportCounts(), GatewayReport)

    async def ping(self, timeout_s: float) -> None:
        """Once. Raises Unreachable."""
        await self._client.call(Ping(), Done, timeout_s)

    def close(self) -> None:
        self._client.close()

    async def _ask(self, request: msgspec.Struct, expected: type[Reply]) -> Reply:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while True:
            try:
                return await self._client.call(request, expected, max(ASK_AGAIN_S, deadline - clock()), said_by="gateway: ")
            except Unreachable as error:
                if clock() > deadline:
                    name = type(request).__name__
                    raise GatewayFailed(
                        f"gateway: {name} was not answered within {self._timeout_s:g} s: {error.reason}"
                    ) from error
                await asyncio.sleep(ASK_AGAIN_S)
