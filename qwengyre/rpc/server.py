"""Serve typed requests: a table says which handler takes which type; each has one reply, or is refused with a typed error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import operator
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError, MessageTooLarge, QwenGyreError, WireError
from qwengyre.rpc import tls
from qwengyre.rpc.address import TcpAddress, UnixAddress, parse_address
from qwengyre.rpc.connection import Connection
from qwengyre.rpc.frames import MAX_MESSAGE_BYTES, NO_REPLY, Frame, Oversized
from qwengyre.rpc.hello import NONCE_BYTES, ServerHello
from qwengyre.rpc.refusal import describe

log = logging.getLogger(__name__)
MAX_STRANGERS: Final = 128
"""Connections that have not proved anything yet. With more, the oldest is closed: a peer of ours says hello within a round trip."""
CLOSE_DEADLINE_S: Final = 5.0
"""For what is still on its way to peers; one that does not read waits for nothing."""

Handlers = Mapping[type[msgspec.Struct], Callable[[Any], Awaitable[msgspec.Struct]]]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The reply to a request that has nothing to tell."""


class Service:
    """What a server does for one peer: `handlers` for its requests; subclasses for what is said without being asked."""

    messages: tuple[type[msgspec.Struct], ...] = ()
    """Types that `hear` takes."""

    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers

    def begin(self, connection: Connection) -> None:
        """The peer is welcome."""

    def hear(self, message: msgspec.Struct) -> None:
        """A message that wants no reply."""

    def end(self) -> None:
        """The peer is gone."""


class RpcServer:
    """For peers that know `secret`; without one on a Unix socket only, for whoever can open it. One `Service` for each peer."""

    def __init__(self, secret: bytes | None, serve: Callable[[], Service]) -> None:
        if secret == b"":
            raise ConfigError("a server needs a secret, or any process of this machine could drive it")
        self.secret, self.serve = secret, serve
        self.contexts = tls.used() if secret is not None else None
        self.peers: dict[Peer, None] = {}
        """In the order in which they came."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def listen(self, address: str) -> str:
        """Return the address, with the port that was picked for port 0. Raises ConfigError when it is taken."""
        loop, where = asyncio.get_running_loop(), parse_address(address)
        try:
            if isinstance(where, UnixAddress):
                self._listener = await loop.create_unix_server(self._accept, where.path)
                Path(where.path).chmod(0o600)
                return address
            if self.secret is None:
                raise ConfigError(f"{address} can be reached by others: a server there needs a secret")
            self._listener = await loop.create_server(self._accept, where.host, where.port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        return str(TcpAddress(where.host, self._listener.sockets[0].getsockname()[1]))

    async def listen_on(self, listener: socket.socket) -> None:
        """On a Unix socket that listens already."""
        self._listener = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Stop listening, cut the connections, and drop the requests that run."""
        if self._listener is not None:
            self._listener.close()
        peers = list(self.peers)
        for peer in peers:
            peer.connection.close()
        for task in list(self.tasks):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.gather(*(peer.is_gone.wait() for peer in peers))

    def _accept(self) -> Connection:
        peer = Peer(self)
        self.peers[peer] = None
        strangers = [peer for peer in self.peers if not peer.connection.is_welcome]
        if len(strangers) > MAX_STRANGERS:
            strangers[0].connection.close("too many connections without a hello")
        return peer.connection


class Peer:
    """One connection of a server, and its requests."""

    def __init__(self, server: RpcServer) -> None:
        self._server, self._service = server, server.serve()
        self.is_gone = asyncio.Event()
        hello = (
            None
            if server.secret is None
            else ServerHello(server.secret, secrets.token_bytes(NONCE_BYTES), tls=server.contexts is not None)
        )
        self.connection = Connection(hello, self, server.contexts)
        self._decode = decoder((*self._service.handlers, *self._service.messages)).decode

    def on_welcome(self) -> None:
        self._service.begin(self.connection)

    def on_frame(self, frame: Frame | Oversized) -> None:
        if isinstance(frame, Oversized):
            self._refuse(frame.number, MessageTooLarge("a request", num_bytes=frame.num_bytes, max_bytes=MAX_MESSAGE_BYTES))
            return
        try:
            message = self._decode(frame.body)
        except msgspec.MsgspecError as error:
            self._refuse(frame.number, WireError(f"not a request that is known here: {error}"))
            return
        if frame.number == NO_REPLY:
            self._service.hear(message)
            return
        task = asyncio.get_running_loop().create_task(self._answer(frame.number, message))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def on_lost(self, reason: str) -> None:
        self._server.peers.pop(self, None)
        self._service.end()
        self.is_gone.set()

    async def _answer(self, number: int, request: msgspec.Struct) -> None:
        """A request that has begun is carried to its end, also when the peer has gone meanwhile."""
        name = type(request).__name__
        try:
            reply = await self._service.handlers[type(request)](request)
            self.connection.send(reply, number)
        except QwenGyreError as error:
            self._refuse(number, error)
        except Exception:  # the outermost frame of its task: who asked hears that it broke, and the log says why
            log.exception("request_failed", extra={"request": name})
            self._refuse(number, WireError(f"{name} broke off: the log of that process says why"))

    def _refuse(self, number: int, error: QwenGyreError) -> None:
        if number == NO_REPLY:
            self.connection.close(str(error))
        else:
            self.connection.send(describe(error), number)


@functools.cache
def decoder(kinds: tuple[type[msgspec.Struct], ...]) -> msgspec.msgpack.Decoder[msgspec.Struct]:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds))
