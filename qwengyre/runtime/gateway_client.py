"""The controller's end of the gateway's control API (gateway/control.py), over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import httpx
import msgspec

from qwengyre.core.errors import GatewayFailed
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.gateway.control_api import (
    AddServer,
    ClosedExecution,
    GatewayReport,
    Move,
    Moved,
    OpenedExecution,
    OpenExecution,
)

MSGPACK = "application/msgpack"


class GatewayClient:
    """Every order is idempotent and is sent again while the gateway restarts, until `timeout_s`."""

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=64)),
            base_url="http://gateway",
            headers={"content-type": MSGPACK, "accept": MSGPACK},
            timeout=timeout_s,
        )

    async def open(self, order: OpenExecution) -> OpenedExecution:
        return msgspec.msgpack.decode(await self._send("POST", "/control/executions", order), type=OpenedExecution)

    async def close_execution(self, execution: ExecutionId) -> ClosedExecution:
        """What it said; its key dies. Answers the same when asked again."""
        body = await self._send("POST", f"/control/executions/{execution}/close", {})
        return msgspec.msgpack.decode(body, type=ClosedExecution)

    async def add_server(self, server: ServerId, address: str, token: str) -> None:
        await self._send("POST", "/control/servers", AddServer(server, address, token.encode()))

    async def remove_server(self, server: ServerId) -> None:
        await self._send("DELETE", f"/control/servers/{server}", None)

    async def route(self, routes: Mapping[ExecutionId, ServerId | None]) -> None:
        await self._send("POST", "/control/routes", dict(routes))

    async def move(self, source: ServerId, moves: Mapping[ExecutionId, ServerId | None]) -> Moved:
        """It has half of what the gateway may take to answer; KV that was not carried by then is computed again."""
        body = await self._send("POST", "/control/move", Move(source, dict(moves), self._timeout_s / 2))
        return msgspec.msgpack.decode(body, type=Moved)

    async def report(self) -> GatewayReport:
        return msgspec.msgpack.decode(await self._send("GET", "/control/stats", None), type=GatewayReport)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _send(self, method: str, path: str, body: object) -> bytes:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        content = None if body is None else msgspec.msgpack.encode(body)
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
            raise GatewayFailed(f"gateway: {method} {path}: {response.status_code} {response.content[:500]!r}")
