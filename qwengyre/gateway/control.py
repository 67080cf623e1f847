"""The control listener, an ASGI application on a Unix socket that harnesses never see. Bodies: `control_api`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.api import Engine
from qwengyre.gateway.app import Receive, Scope, Send
from qwengyre.gateway.control_api import (
    AddServer,
    ClosedExecution,
    GatewayReport,
    Move,
    OpenedExecution,
    OpenExecution,
)
from qwengyre.gateway.gateway import Gateway
from qwengyre.gateway.moves import move
from qwengyre.gateway.records import Opened
from qwengyre.gateway.session import Session
from qwengyre.gateway.stats import SessionCounts

log = logging.getLogger(__name__)
MSGPACK: Final = "application/msgpack"
MAX_BODY_BYTES: Final = 16 * 1024 * 1024

Connect = Callable[[AddServer], Engine]


class _Answer(Exception):
    def __init__(self, status: int, message: str):
        self.status, self.message = status, message


class ControlApp:
    """`connect` makes the client of an engine's address; `stop` ends the process."""

    def __init__(self, gateway: Gateway, connect: Connect, stop: asyncio.Event):
        self._gateway, self._connect, self._stop = gateway, connect, stop
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., Awaitable[object]]]] = [
            ("POST", re.compile(r"^/control/executions$"), self._open),
            ("POST", re.compile(r"^/control/executions/(?P<execution>[^/]+)/close$"), self._close),
            ("POST", re.compile(r"^/control/servers$"), self._add_server),
            ("DELETE", re.compile(r"^/control/servers/(?P<server>[^/]+)$"), self._remove_server),
            ("POST", re.compile(r"^/control/routes$"), self._route),
            ("POST", re.compile(r"^/control/move$"), self._move),
            ("GET", re.compile(r"^/control/stats$"), self._report),
            ("GET", re.compile(r"^/control/health$"), self._health),
            ("POST", re.compile(r"^/control/shutdown$"), self._shutdown),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        is_msgpack = headers.get("content-type", "").startswith(MSGPACK) or headers.get("accept", "") == MSGPACK
        body = _Body(await _read(receive), is_msgpack)
        try:
            status, answer = 200, await self._dispatch(scope["method"], scope["path"], body)
        except _Answer as refused:
            status, answer = refused.status, {"error": refused.message}
        except KeyError as unknown:
            status, answer = 404, {"error": f"{unknown.args[0]} was never opened here"}
        except ConfigError as error:
            status, answer = 409, {"error": str(error)}
        except QwenGyreError as error:
            status, answer = 500, {"error": str(error)}
        encoded = msgspec.msgpack.encode(answer) if is_msgpack else msgspec.json.encode(answer)
        kind = MSGPACK if is_msgpack else "application/json"
        head = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(encoded))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": encoded})

    async def _dispatch(self, method: str, path: str, body: _Body) -> object:
        for allowed, pattern, handler in self._routes:
            found = pattern.match(path)
            if found and allowed == method:
                return await handler(body, **found.groupdict())
        raise _Answer(404, f"there is no {method} {path} here")

    async def _open(self, body: _Body) -> OpenedExecution:
        asked = body.decode(OpenExecution)
        opened = Opened(
            session=-1,
            execution=asked.execution,
            attempt=asked.attempt,
            seed=asked.seed,
            temperature=asked.temperature,
            trainable=asked.trainable,
            max_context_tokens=asked.max_context_tokens,
            max_tokens_per_call=asked.max_tokens_per_call,
            model=asked.model,
        )
        execution = await self._gateway.open(opened)
        if asked.server is not None:
            execution.route.set(asked.server)
        await self._gateway.wait_durable()
        return OpenedExecution(key=execution.keys.key, path=execution.keys.path)

    async def _close(self, body: _Body, execution: str) -> ClosedExecution:
        session = await self._gateway.close(ExecutionId(execution))
        await self._gateway.wait_durable()
        return ClosedExecution(
            execution=session.opened.execution,
            attempt=session.opened.attempt,
            events=session.rows.events(),
            counts=_counts(session),
        )

    async def _health(self, body: _Body) -> dict:
        """Says nothing but that this process runs."""
        return {}

    async def _add_server(self, body: _Body) -> dict:
        asked = body.decode(AddServer)
        await self._gateway.set_server(asked.server, self._connect(asked))
        return {}

    async def _remove_server(self, body: _Body, server: str) -> dict:
        await self._gateway.set_server(ServerId(server), None)
        return {}

    async def _route(self, body: _Body) -> dict:
        routes = body.decode(dict[ExecutionId, ServerId | None])
        unknown = [execution for execution in routes if execution not in self._gateway.executions]
        for execution, server in routes.items():
            if execution not in unknown:
                self._gateway.executions[execution].route.set(server)
        return {"unknown": unknown}

    async def _move(self, body: _Body) -> object:
        asked = body.decode(Move)
        return await move(self._gateway, asked)

    async def _report(self, body: _Body) -> GatewayReport:
        executions = self._gateway.executions
        return GatewayReport(
            stats=self._gateway.stats,
            executions={name: len(execution.live) for name, execution in executions.items()},
            routes={name: execution.route.server for name, execution in executions.items()},
            servers=self._gateway.servers(),
        )

    async def _shutdown(self, body: _Body) -> dict:
        self._stop.set()
        return {}


class _Body:
    def __init__(self, data: bytes, is_msgpack: bool):
        self._data, self._is_msgpack = data, is_msgpack

    def decode(self, form: Any) -> Any:
        decode = msgspec.msgpack.decode if self._is_msgpack else msgspec.json.decode
        try:
            return decode(self._data, type=form)
        except msgspec.MsgspecError as error:
            raise _Answer(400, str(error)) from error


def _counts(session: Session) -> SessionCounts:
    ended = [call.ended for call in session.rows if call.ended is not None]
    return SessionCounts(
        calls=len(session.rows),
        tokens=session.rows.num_distinct(),
        tokens_sampled=sum(call.num_sampled for call in session.rows),
        num_moves=sum(end.num_moves for end in ended),
        held_s=sum(end.held_s for end in ended),
    )


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            break
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)
