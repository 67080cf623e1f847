"""Serve an engine of this process to other processes over one multiplexed connection each."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

from qwengyre.core.errors import ConfigError, EngineUnavailable, QwenGyreError
from qwengyre.engines.api import Engine, KVHandle, TokenChunk
from qwengyre.engines.wire import (
    HEARTBEAT_S,
    HELLO_DEADLINE_S,
    Answer,
    Ask,
    Chunks,
    Failed,
    FrameProtocol,
    FromClient,
    Hello,
    Start,
    Status,
)
from qwengyre.rpc.refusal import describe


class EngineServer:
    """Serves `engine` to peers that know `secret`. Addresses: `tcp://HOST:PORT` (port 0 picks one) or `unix:PATH`."""

    def __init__(self, engine: Engine, *, secret: bytes):
        if not secret:
            raise ConfigError("an engine server needs a secret, or any process of this machine could drive the engine")
        self.engine, self.secret = engine, secret
        self._server: asyncio.Server | None = None
        self._peers: set[_Peer] = set()

    async def serve(self, address: str) -> str:
        """Listen; return the address with the port that was picked. Raises ConfigError when it is taken."""
        loop = asyncio.get_running_loop()
        kind, target = split_address(address)
        try:
            if kind == "unix":
                self._server = await loop.create_unix_server(self._connect, target)
                Path(target).chmod(0o600)
                return address
            host, _, port = target.rpartition(":")
            self._server = await loop.create_server(self._connect, host, int(port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        return f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and cut the connections; the engine lives on."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            await peer.close()

    def _connect(self) -> FrameProtocol:
        peer = _Peer(self)
        self._peers.add(peer)
        return peer.protocol

    def forget(self, peer: _Peer) -> None:
        self._peers.discard(peer)


class _Peer:
    """One connection: its requests die with it."""

    def __init__(self, server: EngineServer):
        self.server, self.engine = server, server.engine
        self.protocol = FrameProtocol(FromClient, self._on_message, self._on_lost)
        self._welcome = False
        self._lost = asyncio.Event()
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._outgoing: list[TokenChunk] = []
        self._spawn("heartbeat", self._heartbeat())

    async def close(self) -> None:
        self.protocol.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), HELLO_DEADLINE_S)

    def _spawn(self, key: object, work: Awaitable[None]) -> None:
        task = self._tasks[key] = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: self._tasks.pop(key) if self._tasks.get(key) is done else None)

    def _on_message(self, message: FromClient) -> None:
        if isinstance(message, Hello):
            self._welcome = hmac.compare_digest(message.token, self.server.secret)
            if self._welcome:
                self._send_status()
        if not self._welcome:
            self.protocol.close()
        elif isinstance(message, Start):
            self._spawn(message.request.request_id, self._generate(message))
        elif isinstance(message, Ask):
            self._spawn(message.number, self._answer(message))

    def _on_lost(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        self._lost.set()
        self.server.forget(self)

    async def _heartbeat(self) -> None:
        """Close a connection without a valid hello; then show that this process lives."""
        await asyncio.sleep(HELLO_DEADLINE_S if not self._welcome else 0)
        if not self._welcome:
            self.protocol.close()
            return
        while True:
            self._send_status()
            await asyncio.sleep(HEARTBEAT_S)

    async def _generate(self, start: Start) -> None:
        request_id = start.request.request_id
        stream = self.engine.generate(start.request)
        try:
            async for chunk in stream:
                if not self._outgoing:
                    asyncio.get_running_loop().call_soon(self._send_chunks)
                self._outgoing.append(chunk)
        except QwenGyreError as error:
            self._send_chunks()
            self.protocol.send(Failed(request_id, describe(error)))
        finally:
            await stream.aclose()

    def _send_chunks(self) -> None:
        if self._outgoing:
            if any(chunk.finish_reason for chunk in self._outgoing):
                self._send_status()
            self.protocol.send(Chunks(self._outgoing))
            self._outgoing = []

    def _send_status(self) -> None:
        engine = self.engine
        self.protocol.send(Status(engine.capacity(), engine.stats(), engine.capabilities()))

    async def _answer(self, ask: Ask) -> None:
        try:
            operation = OPERATIONS.get(ask.method)
            if operation is None:
                raise EngineUnavailable(f"the engine server knows no operation {ask.method!r}")
            result = await operation(self.engine, ask)
        except QwenGyreError as error:
            answer = Answer(ask.number, failure=describe(error))
        else:
            handle = result if isinstance(result, KVHandle) else None
            answer = Answer(ask.number, handle=handle, num_tokens=result if isinstance(result, int) else 0)
        self._send_chunks()
        self._send_status()
        self.protocol.send(answer)


Operation = Callable[[Engine, Ask], Awaitable[KVHandle | int | None]]
OPERATIONS: dict[str, Operation] = {
    "abort": lambda engine, ask: engine.abort(ask.request_ids),
    "pause": lambda engine, ask: engine.pause(ask.mode),
    "resume": lambda engine, ask: engine.resume(),
    "update_weights": lambda engine, ask: engine.update_weights(ask.snapshot, ask.version),
    "export_kv": lambda engine, ask: engine.export_kv(ask.token_ids),
    "import_kv": lambda engine, ask: engine.import_kv(ask.handle),
    "release": lambda engine, ask: engine.release(ask.handle_id),
    "offload": lambda engine, ask: engine.offload(),
    "restore": lambda engine, ask: engine.restore(ask.snapshot, ask.version),
}


def split_address(address: str) -> tuple[str, str]:
    """
    >>> split_address("tcp://127.0.0.1:80"), split_address("unix:/run/engine")
    (('tcp', '127.0.0.1:80'), ('unix', '/run/engine'))
    """
    if address.startswith("tcp://"):
        return "tcp", address.removeprefix("tcp://")
    if address.startswith("unix:"):
        return "unix", address.removeprefix("unix:")
    raise ConfigError(f"an engine address is tcp://HOST:PORT or unix:PATH, not {address!r}")
