"""The controller's end of the gateway's control API (gateway/control.py), over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import httpx
import msgspec

from qwengyre.core.errors import QwenGyreError
from qwengyre.gateway.control import (
    ClosedExecution,
    GatewayStats,
    MoveReport,
    OpenedExecution,
    OpenExecution,
)


class GatewayFailed(QwenGyreError):
    """The gateway refused an order, or stayed away longer than its deadline."""


class GatewayClient:
    """Every order is idempotent and is sent again while the gateway restarts, until `timeout_s`."""

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=64)),
            base_url="http://gateway",
            timeout=timeout_s,
        )

    async def open(self, order: OpenExecution) -> OpenedExecution:
        return msgspec.json.decode(await self._send("POST", "/control/executions", order), type=OpenedExecution)

    async def close_execution(self, execution: str) -> ClosedExecution:
        body = await self._send("POST", f"/control/executions/{execution}/close", {})
        return msgspec.msgpack.decode(body, type=ClosedExecution)

    async def add_server(self, server: str, address: str, token: str) -> None:
        await self._send("POST", "/control/servers", {"server": server, "address": address, "token": token})

    async def remove_server(self, server: str) -> None:
        await self._send("DELETE", f"/control/servers/{server}", None)

    async def route(self, routes: Mapping[str, str | None]) -> None:
        await self._send("POST", "/control/routes", dict(routes))

    async def move(self, source: str, moves: Mapping[str, str | None]) -> MoveReport:
        body = await self._send("POST", "/control/move", {"source": source, "moves": dict(moves)})
        return msgspec.json.decode(body, type=MoveReport)

    async def stats(self) -> GatewayStats:
        return msgspec.json.decode(await self._send("GET", "/control/stats", None), type=GatewayStats)

    async def shut_down(self) -> None:
        await self._send("POST", "/control/shutdown", {})

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _send(self, method: str, path: str, body: object) -> bytes:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        content = None if body is None else msgspec.json.encode(body)
        while True:
            try:
                response = await self._http.request(method, path, content=content)
            except httpx.TransportError as error:
                if asyncio.get_running_loop().time() > deadline:
                    reason = error or type(error).__name__
                    raise GatewayFailed(f"gateway: {method} {path}: {reason} for {self._timeout_s:g} s") from error
                await asyncio.sleep(0.1)
                continue
            if response.is_success:
                return response.content
            raise GatewayFailed(f"gateway: {method} {path}: {response.status_code} {response.text[:500]}")
