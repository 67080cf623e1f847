"""Serve an engine of this process to other processes, over one connection each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from qwengyre.core.errors import QwenGyreError
from qwengyre.engines.api import Serving, TokenChunk
from qwengyre.engines.wire import (
    HEARTBEAT_S,
    Abort,
    Chunks,
    Exported,
    ExportKV,
    Failed,
    Imported,
    ImportKV,
    Release,
    StartCall,
    Status,
)
from qwengyre.rpc.connection import Connection
from qwengyre.rpc.refusal import describe
from qwengyre.rpc.server import Done, RpcServer, Service


class EngineServer:
    """Serves `engine` to peers that know `secret`. Addresses: `tcp://HOST:PORT` (port 0 picks one) or `unix:PATH`."""

    def __init__(self, engine: Serving, *, secret: bytes):
        """Raises ConfigError without a secret."""
        self.engine = engine
        self._server = RpcServer(secret, lambda: _Peer(engine))

    @property
    def connections(self) -> list[Connection]:
        return [peer.connection for peer in self._server.peers]

    async def serve(self, address: str) -> str:
        """Listen; return the address with the port that was picked. Raises ConfigError when it is taken."""
        return await self._server.listen(address)

    async def close(self) -> None:
        """Stop listening and cut the connections; the engine lives on."""
        await self._server.close()


class _Peer(Service):
    """One connection: its calls die with it."""

    messages = (StartCall,)
    _connection: Connection
    """Since `begin`: nobody is answered before."""

    def __init__(self, engine: Serving):
        self.engine = engine
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._outgoing: list[TokenChunk] = []
        super().__init__({kind: self._answering(operation) for kind, operation in OPERATIONS.items()})

    def begin(self, connection: Connection) -> None:
        self._connection = connection
        self._spawn("heartbeat", self._heartbeat())

    def hear(self, message: msgspec.Struct) -> None:
        assert isinstance(message, StartCall), "`messages` has nothing else"
        self._spawn(message.request.request_id, self._generate(message))

    def end(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    def _spawn(self, key: object, work: Awaitable[None]) -> None:
        task = self._tasks[key] = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: self._tasks.pop(key) if self._tasks.get(key) is done else None)

    async def _heartbeat(self) -> None:
        """Show that this process lives."""
        while True:
            self._send_status()
            await asyncio.sleep(HEARTBEAT_S)

    async def _generate(self, start: StartCall) -> None:
        request_id = start.request.request_id
        stream = self.engine.generate(start.request)
        try:
            async for chunk in stream:
                if not self._outgoing:
                    asyncio.get_running_loop().call_soon(self._send_chunks)
                self._outgoing.append(chunk)
        except QwenGyreError as error:
            self._send_chunks()
            self._connection.send(Failed(request_id, describe(error)))
        finally:
            await stream.aclose()

    def _send_chunks(self) -> None:
        if self._outgoing:
            if any(chunk.finish_reason for chunk in self._outgoing):
                self._send_status()
            self._connection.send(Chunks(self._outgoing))
            self._outgoing = []

    def _send_status(self) -> None:
        engine = self.engine
        self._connection.send(Status(engine.capacity(), engine.stats()))

    def _answering(self, operation: Operation) -> Callable[[Any], Awaitable[msgspec.Struct]]:
        """The reply comes after what the operation has changed: tokens of calls that it ended, and the status."""

        async def answer(request: msgspec.Struct) -> msgspec.Struct:
            try:
                return await operation(self.engine, request)
            finally:
                self._send_chunks()
                self._send_status()

        return answer


async def _abort(engine: Serving, asked: Abort) -> Done:
    await engine.abort(asked.request_ids)
    return Done()


async def _export_kv(engine: Serving, asked: ExportKV) -> Exported:
    return Exported(await engine.export_kv(asked.token_ids))


async def _import_kv(engine: Serving, asked: ImportKV) -> Imported:
    return Imported(await engine.import_kv(asked.handle))


async def _release(engine: Serving, asked: Release) -> Done:
    await engine.release(asked.handle_id)
    return Done()


Operation = Callable[[Serving, Any], Awaitable[msgspec.Struct]]
OPERATIONS: Final[dict[type[msgspec.Struct], Operation]] = {
    Abort: _abort,
    ExportKV: _export_kv,
    ImportKV: _import_kv,
    Release: _release,
}
