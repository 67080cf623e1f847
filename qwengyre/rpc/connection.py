"""One end of a connection on an event loop: the hello, then frames."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Final, Protocol

import msgspec

from qwengyre.core.errors import WireError
from qwengyre.rpc import tls
from qwengyre.rpc.frames import MAX_MESSAGE_BYTES, NO_REPLY, Frame, FrameCutter, Oversized, header
from qwengyre.rpc.hello import MAX_HELLO_BYTES, ClientHello, ServerHello

log = logging.getLogger(__name__)
HELLO_DEADLINE_S: Final = 10.0
"""A process of ours that is so busy that it says hello later is as good as gone."""
MAX_BACKLOG_BYTES: Final = 64 << 20
"""Messages that a peer can leave unread before it is taken for dead. Replies do not count: it has asked for them."""

HUNG_UP: Final = "it does not take this node's certificate, or went away: its log says which. Give every node a certificate of the same CA (tls.cert, tls.ca)"


class Owner(Protocol):
    """What a connection tells."""

    def on_welcome(self) -> None:
        """Both ends have proved that they know the secret, or there is none."""
        ...

    def on_frame(self, frame: Frame | Oversized) -> None: ...

    def on_lost(self, reason: str) -> None:
        """Once, whoever closed it."""
        ...


class Connection(asyncio.Protocol):
    """Without `hello`, on a Unix socket, whoever could open it is welcome. With `contexts` TLS follows the hello."""

    def __init__(self, hello: ServerHello | ClientHello | None, owner: Owner, contexts: tls.Contexts | None = None) -> None:
        self._hello, self._owner = hello, owner
        self._tls = contexts
        self._securing: asyncio.Task[None] | None = None
        self._early = b""
        """What TLS has told before `start_tls` returned: it may come with the last bytes of the handshake."""
        self._is_welcome = hello is None
        self._cutter = FrameCutter(MAX_MESSAGE_BYTES if hello is None else MAX_HELLO_BYTES)
        self._encode = msgspec.msgpack.Encoder().encode
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._why_closed = ""
        self._is_over = self._has_heard = False

    @property
    def is_welcome(self) -> bool:
        return self._is_welcome

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._hello is None:
            self._owner.on_welcome()
            return
        late = f"there was no hello within {HELLO_DEADLINE_S:g} s"
        self._deadline = asyncio.get_running_loop().call_later(HELLO_DEADLINE_S, self.close, late)
        if (opening := self._hello.opening()) is not None:
            self.send(opening)

    def data_received(self, data: bytes) -> None:
        if self._securing is not None and not self._is_welcome:
            self._early += data  # TLS has told it: the transport below does not read for us any more
            return
        try:
            for frame in self._cutter.feed(data):
                if self._hello is None or self._is_welcome:
                    self._has_heard = True
                    self._owner.on_frame(frame)
                elif self._securing is None:
                    self._hear_hello(self._hello, frame)
                else:
                    raise WireError("the peer went on without TLS")
            if self._securing is not None and not self._is_welcome and not self._cutter.is_between:
                raise WireError("the peer went on without TLS")  # else it would count as the beginning of what TLS tells
        except WireError as error:
            self.close(str(error))

    def _hear_hello(self, hello: ServerHello | ClientHello, frame: Frame | Oversized) -> None:
        if isinstance(frame, Oversized):
            raise WireError("the peer did not begin with a hello")
        if (said := hello.hear(frame.body)) is not None:
            self.send(said)
        if hello.is_over and self._tls is None:
            self._welcome()
        elif hello.is_over and self._tls is not None:
            assert self._transport is not None
            self._transport.pause_reading()  # what comes next is TLS, and goes to who can read it
            self._securing = asyncio.get_running_loop().create_task(self._secure(self._tls))

    def _welcome(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._cutter.max_bytes = MAX_MESSAGE_BYTES
        self._is_welcome = True
        self._owner.on_welcome()

    async def _secure(self, contexts: tls.Contexts) -> None:
        is_server, transport = isinstance(self._hello, ServerHello), self._transport
        assert transport is not None
        try:
            self._transport = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                contexts.server if is_server else contexts.client,
                server_side=is_server,
                ssl_handshake_timeout=HELLO_DEADLINE_S,
                ssl_shutdown_timeout=tls.CLOSE_S,
            )
        except OSError as error:
            log.warning("peer_turned_away", extra={"reason": self._why(error)})
            transport.abort()
            self.connection_lost(error)  # the event loop tells this of a handshake that failed only sometimes
            return
        if self._transport is None or self._transport.is_closing():  # it ended meanwhile, which is not always told either
            self.connection_lost(None)
            return
        self._welcome()
        early, self._early = self._early, b""
        self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._is_over:
            return
        self._is_over = True
        self._owner.on_lost(self._why_closed or self._why(exc))

    def _why(self, error: Exception | None) -> str:
        """The end of a handshake is the server's word: a client whose certificate it does not take may only hear that it hung up."""
        if isinstance(error, ssl.SSLError):
            return tls.in_words(error)
        if isinstance(self._hello, ClientHello) and self._securing is not None and not self._has_heard:
            return HUNG_UP
        return (str(error) or type(error).__name__) if error else "the other side closed the connection"

    def send(self, message: msgspec.Struct, number: int = NO_REPLY) -> None:
        """Queue one message. Raises MessageTooLarge. A peer that does not read what it did not ask for is cut off."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body = self._encode(message)
        transport.writelines((header(type(message).__name__, number, body), body))
        if number == NO_REPLY and transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            self.cut("the other side does not read")

    def cut(self, reason: str) -> None:
        """At once, whatever is still to be sent: to who does not read, that would be never."""
        self._why_closed = self._why_closed or reason
        if self._transport is not None:
            self._transport.abort()

    def close(self, reason: str = "closed by this side") -> None:
        """After what is still to be sent."""
        self._why_closed = self._why_closed or reason
        if self._transport is not None:
            self._transport.close()
