"""Frames between `EngineServer` and `RemoteEngine`: four bytes of length, then one msgpack message.

    client -> server   Hello, then Start (a request) and Ask (any other operation, answered by number)
    server -> client   Status (first, and at least every HEARTBEAT_S), Chunks (of all requests of one turn), Answer, Failed

Many requests share one connection, so a turn of the engine costs one frame, not one per request.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import msgspec

from qwengyre.engines.api import Capabilities, Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.rpc.refusal import Refused
from qwengyre.transfer.api import Exposure

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
MAX_BACKLOG_BYTES = 64 << 20
"""Bytes that a peer may leave unread before it is taken for dead."""
HEARTBEAT_S = 1.0
HELLO_DEADLINE_S = 10.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    token: bytes


class Start(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Ask(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Call a method of the engine. Only the arguments that it takes are set."""

    number: int
    method: str
    request_ids: list[str] = []
    mode: str = ""
    snapshot: Exposure | None = None
    version: int = 0
    token_ids: bytes = b""
    handle: KVHandle | None = None
    handle_id: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    number: int
    handle: KVHandle | None = None
    num_tokens: int = 0
    failure: Refused | None = None


class Chunks(msgspec.Struct, frozen=True, tag=True):
    chunks: list[TokenChunk]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ended with an error."""

    request_id: str
    failure: Refused


class Status(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity
    stats: EngineStats
    capabilities: Capabilities


FromClient = Hello | Start | Ask
FromServer = Status | Chunks | Answer | Failed


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream into messages. Anything that is no message of the type expected closes the connection."""

    def __init__(self, incoming: object, on_message: Callable[[object], None], on_lost: Callable[[], None]):
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message, self._on_lost = on_message, on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        try:
            while len(received) - at >= LENGTH.size:
                (size,) = LENGTH.unpack_from(received, at)
                if size > MAX_FRAME_BYTES:
                    raise msgspec.DecodeError(f"a frame of {size} bytes")
                if len(received) - at - LENGTH.size < size:
                    break
                start = at + LENGTH.size
                at = start + size
                self._on_message(self._decoder.decode(bytes(received[start:at])))
        except msgspec.DecodeError:
            self.close()
            return
        del received[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def send(self, message: object) -> None:
        """Queue one message; a peer that has stopped reading is cut off."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        body = self._encoder.encode(message)
        transport.write(LENGTH.pack(len(body)) + body)
        if transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
