"""Ask another process: a typed request, and its typed reply or the error that it was refused with."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec

from qwengyre.core.errors import MessageTooLarge, Unreachable, WireError
from qwengyre.rpc import tls
from qwengyre.rpc.address import UnixAddress, parse_address
from qwengyre.rpc.connection import Connection
from qwengyre.rpc.frames import MAX_MESSAGE_BYTES, NO_REPLY, Frame, Oversized
from qwengyre.rpc.hello import NONCE_BYTES, ClientHello
from qwengyre.rpc.refusal import Refused, rebuild
from qwengyre.rpc.server import decoder

Reply = TypeVar("Reply", bound=msgspec.Struct)


class Client:
    """Connects at first use, and again after a loss. All requests share one connection.

    `messages` are the types that the server says without being asked; `hear` takes them. `on_lost(reason)` is told once for each
    connection that ends.
    """

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        *,
        messages: tuple[type[msgspec.Struct], ...] = (),
        hear: Callable[[msgspec.Struct], None] = lambda message: None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.address, self._where, self._secret = address, parse_address(address), secret
        self._decode = decoder(messages).decode if messages else None
        self._hear, self._on_lost = hear, on_lost
        self._tls = tls.used() if secret is not None else None
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def call(
        self, request: msgspec.Struct, expected: type[Reply], timeout_s: float, name: str = "", said_by: str = ""
    ) -> Reply:
        """Raises Unreachable without a reply in time, MessageTooLarge, or what the server refused with, `said_by` before its words.

        `name` is what errors call the request; its type by default.
        """
        name = name or type(request).__name__
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._connected()
                frame = await link.ask(request, next(self._numbers))
        except TimeoutError:
            raise Unreachable(self.address, f"{name} was not answered within {timeout_s:g} s") from None
        if isinstance(frame, Oversized):
            raise MessageTooLarge(f"the reply to {name}", num_bytes=frame.num_bytes, max_bytes=MAX_MESSAGE_BYTES)
        try:
            reply = decoder((expected, Refused)).decode(frame.body)
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.address}: the reply to {name} is not a {expected.__name__}: {error}") from error
        if isinstance(reply, Refused):
            raise rebuild(reply, said_by)
        assert isinstance(reply, expected)
        return reply

    async def connect(self, timeout_s: float) -> None:
        """Connect now. Raises Unreachable when nobody answers there, or does not know the secret."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected()
        except TimeoutError:
            raise Unreachable(self.address, f"no hello within {timeout_s:g} s") from None

    async def say(self, message: msgspec.Struct, timeout_s: float) -> None:
        """Send what wants no reply. Raises Unreachable without a connection."""
        await self.connect(timeout_s)
        self.say_nowait(message)

    def say_nowait(self, message: msgspec.Struct) -> None:
        """To a server that is connected; nothing otherwise."""
        if self._link is not None:
            self._link.connection.send(message)

    def request_nowait(self, request: msgspec.Struct) -> None:
        """A request of which nobody awaits the reply."""
        if self._link is not None:
            self._link.connection.send(request, next(self._numbers))

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    def close(self, reason: str = "closed by this side") -> None:
        if self._link is not None:
            self._link.connection.close(reason)

    def cut(self, reason: str) -> None:
        """Close the connection to a server that may not read any more."""
        if self._link is not None:
            self._link.connection.cut(reason)

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._link is not None:
                return self._link
            link = _Link(self, self._hello(), self._tls)
            loop, where = asyncio.get_running_loop(), self._where
            try:
                if isinstance(where, UnixAddress):
                    await loop.create_unix_connection(lambda: link.connection, where.path)
                else:
                    await loop.create_connection(lambda: link.connection, where.host, where.port)
                await link.welcome
            except OSError as error:
                raise Unreachable(self.address, error.strerror or str(error) or type(error).__name__) from error
            except BaseException:
                link.connection.close()
                raise
            return link

    def _hello(self) -> ClientHello | None:
        if self._secret is None:
            return None
        return ClientHello(self._secret, secrets.token_bytes(NONCE_BYTES), tls=self._tls is not None)

    def welcomed(self, link: _Link) -> None:
        self._link = link

    def hear(self, frame: Frame | Oversized) -> None:
        """Raises WireError for what the server does not say: its connection ends then."""
        if self._decode is None or isinstance(frame, Oversized):
            raise WireError(f"{self.address} said something without being asked")
        try:
            message = self._decode(frame.body)
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.address} said what is not known here: {error}") from error
        self._hear(message)

    def lost(self, link: _Link, reason: str) -> None:
        if self._link is link:
            self._link = None
            self._on_lost(reason)


class _Link:
    """One connection of a client, and the requests that wait on it."""

    def __init__(self, client: Client, hello: ClientHello | None, contexts: tls.Contexts | None) -> None:
        self._client = client
        self._waiting: dict[int, asyncio.Future[Frame | Oversized]] = {}
        self.welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection = Connection(hello, self, contexts)
        self._lost: Unreachable | None = None

    async def ask(self, request: msgspec.Struct, number: int) -> Frame | Oversized:
        if self._lost is not None:
            raise self._lost
        reply: asyncio.Future[Frame | Oversized] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            self.connection.send(request, number)
            return await reply
        finally:
            del self._waiting[number]

    def on_welcome(self) -> None:
        self._client.welcomed(self)
        if not self.welcome.done():
            self.welcome.set_result(None)

    def on_frame(self, frame: Frame | Oversized) -> None:
        if frame.number == NO_REPLY:
            self._client.hear(frame)
        elif (reply := self._waiting.get(frame.number)) and not reply.done():
            reply.set_result(frame)

    def on_lost(self, reason: str) -> None:
        self._lost = Unreachable(self._client.address, reason)
        waiting: list[asyncio.Future[None] | asyncio.Future[Frame | Oversized]] = [self.welcome, *self._waiting.values()]
        for reply in waiting:
            if not reply.done():
                reply.set_exception(self._lost)
        self._client.lost(self, reason)
