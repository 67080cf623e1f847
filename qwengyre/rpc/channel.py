"""The same wire for code that blocks, such as the threads of a trainer: one connection, one request at a time."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from qwengyre.core.errors import MessageTooLarge, QwenGyreError, Unreachable, WireError
from qwengyre.rpc import tls
from qwengyre.rpc.address import TcpAddress
from qwengyre.rpc.frames import HEADER, MAX_MESSAGE_BYTES, Frame, Oversized, header
from qwengyre.rpc.hello import MAX_HELLO_BYTES, NONCE_BYTES, ClientHello, ServerHello
from qwengyre.rpc.refusal import Refused, describe, rebuild
from qwengyre.rpc.server import decoder

SKIP_BYTES: Final = 1 << 20  # what is thrown away is read in pieces, so that it needs no memory
NUMBER: Final = 1
"""Of every request and reply: one at a time needs no numbers."""
Request = TypeVar("Request", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=msgspec.Struct)
BlockingHandlers = Mapping[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]


class Channel:
    """One end of a connection. Both ends know the secret, or the connection was inherited from the other end's process."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deadline: float | None = None
        """On the monotonic clock."""

    @classmethod
    def connect(cls, address: TcpAddress, secret: bytes, timeout_s: float) -> Channel:
        """Raises Unreachable when nobody there knows the secret within the deadline."""
        contexts = tls.used()
        try:
            connection = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            raise Unreachable(str(address), str(error)) from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = cls(connection)
            channel.set_deadline(timeout_s)
            channel.shake_hands(ClientHello(secret, secrets.token_bytes(NONCE_BYTES), tls=contexts is not None), contexts)
        except (OSError, WireError) as error:
            connection.close()
            raise Unreachable(str(address), str(error)) from error
        channel.set_deadline(None)
        return channel

    def shake_hands(self, hello: ServerHello | ClientHello, contexts: tls.Contexts | None) -> None:
        """The hello, and TLS after it. Raises WireError, OSError."""
        if (opening := hello.opening()) is not None:
            self.send(opening)
        while not hello.is_over:
            frame = self._receive(MAX_HELLO_BYTES)
            if not isinstance(frame, Frame):
                raise WireError("the other side did not begin with a hello")
            if (said := hello.hear(frame.body)) is not None:
                self.send(said)
        if contexts is not None:
            self._socket = tls.wrapped(self._socket, contexts, is_server=isinstance(hello, ServerHello))

    def call(self, request: msgspec.Struct, expected: type[Reply]) -> Reply:
        """Raises what the other end refused with, WireError, and OSError when the connection broke."""
        self.send(request)
        return self.reply(expected)

    def reply(self, expected: type[Reply]) -> Reply:
        """The reply to a request that was sent. Raises as `call` does."""
        reply = self._decode(self._next(), (expected, Refused))
        if isinstance(reply, Refused):
            raise rebuild(reply)
        assert isinstance(reply, expected)
        return reply

    def serve(self, handlers: BlockingHandlers) -> None:
        """Answer requests until the other end closes. What is not a QwenGyreError is raised, and so is OSError."""
        while (frame := self._receive(MAX_MESSAGE_BYTES)) is not None:
            with contextlib.suppress(QwenGyreError):
                self._answer(frame, handlers)

    def answer_one(self, expected: type[Request], handler: Callable[[Request], msgspec.Struct]) -> Request:
        """Answer one request and return it. Raises what it was refused with, and OSError."""
        request = self._answer(self._next(), {expected: handler})
        assert isinstance(request, expected)
        return request

    def _answer(self, frame: Frame | Oversized, handlers: BlockingHandlers) -> msgspec.Struct:
        try:
            request = self._decode(frame, tuple(handlers))
            self.send(handlers[type(request)](request))
        except QwenGyreError as error:
            self.send(describe(error))
            raise
        return request

    def send(self, message: msgspec.Struct) -> None:
        """Raises MessageTooLarge, OSError."""
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(header(type(message).__name__, NUMBER, body))
        self._socket.sendall(body)

    def _next(self) -> Frame | Oversized:
        frame = self._receive(MAX_MESSAGE_BYTES)
        if frame is None:
            raise ConnectionError("the other side closed the connection")
        return frame

    def _receive(self, max_bytes: int) -> Frame | Oversized | None:
        """None when the stream has ended; of a frame above the bound the header alone."""
        head = self._read(HEADER.size)
        if head is None:
            return None
        num_bytes, number = HEADER.unpack(head)
        if num_bytes > max_bytes:
            return Oversized(number, num_bytes)
        body = self._read(num_bytes)
        return None if body is None else Frame(number, bytes(body))

    def _decode(self, frame: Frame | Oversized, kinds: tuple[type[msgspec.Struct], ...]) -> msgspec.Struct:
        """Raises MessageTooLarge, having read past the frame; WireError for anything but `kinds`."""
        if isinstance(frame, Oversized):
            for done in range(0, frame.num_bytes, SKIP_BYTES):
                self._read(min(SKIP_BYTES, frame.num_bytes - done))
            raise MessageTooLarge("a message", num_bytes=frame.num_bytes, max_bytes=MAX_MESSAGE_BYTES)
        try:
            return decoder(kinds).decode(frame.body)
        except msgspec.MsgspecError as error:
            raise WireError(f"not a message that is known here: {error}") from error

    def _read(self, num_bytes: int) -> bytearray | None:
        """None when the stream has ended."""
        target = bytearray(num_bytes)
        view, done = memoryview(target), 0
        while done < num_bytes:
            if self._deadline is not None:
                self._socket.settimeout(max(1e-3, self._deadline - time.monotonic()))
            num_read = tls.received(self._socket, view[done:])
            if num_read == 0:
                return None
            done += num_read
        return target

    def set_deadline(self, timeout_s: float | None) -> None:
        """For all that is received from now on, together; None: no deadline."""
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Also from another thread: whoever waits on this channel hears that it has ended."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
