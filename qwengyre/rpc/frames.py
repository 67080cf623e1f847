"""How messages lie in the byte stream of every wire between processes of a run. Pure.

    length u32 | number u32 | msgpack of one Struct

`number` is 0 for a message that wants no reply; a reply has the number of its request. A frame above the bound is refused with
MessageTooLarge, by its sender before anything is sent, and by its receiver, who reads past it. Nothing is ever cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from qwengyre.core.errors import MessageTooLarge

HEADER: Final = struct.Struct("<II")
MAX_MESSAGE_BYTES: Final = 256 << 20
"""A micro-step of a million tokens has 13 MB, an execution of as many sampled tokens 10 MB: nothing legal comes near."""
NO_REPLY: Final = 0


class Frame(NamedTuple):
    number: int
    body: bytes


class Oversized(NamedTuple):
    """A frame above the bound, of which nothing but the header was kept."""

    number: int
    num_bytes: int


def header(what: str, number: int, body: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """What goes before `body`. Raises MessageTooLarge; `what` is the kind of message."""
    if len(body) > max_bytes:
        raise MessageTooLarge(what, num_bytes=len(body), max_bytes=max_bytes)
    return HEADER.pack(len(body), number)


class FrameCutter:
    """Cuts a byte stream into frames, in whatever pieces it comes.

    >>> cutter = FrameCutter(max_bytes=3)
    >>> stream = HEADER.pack(2, 7) + b"ab" + HEADER.pack(4, 8) + b"long" + HEADER.pack(0, 0)
    >>> [*cutter.feed(stream[:9]), *cutter.feed(stream[9:])]
    [Frame(number=7, body=b'ab'), Oversized(number=8, num_bytes=4), Frame(number=0, body=b'')]
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._received = bytearray()
        self._num_to_skip = 0

    @property
    def is_between(self) -> bool:
        """Nothing of a next frame has come."""
        return not self._received and not self._num_to_skip

    def feed(self, data: bytes) -> Iterator[Frame | Oversized]:
        if self._num_to_skip:
            skipped = min(self._num_to_skip, len(data))
            self._num_to_skip -= skipped
            data = data[skipped:]
        self._received += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | Oversized | None:
        received = self._received
        if len(received) < HEADER.size:
            return None
        num_bytes, number = HEADER.unpack_from(received)
        end = HEADER.size + num_bytes
        if num_bytes > self.max_bytes:
            self._num_to_skip = max(0, end - len(received))
            del received[:end]
            return Oversized(number, num_bytes)
        if len(received) < end:
            return None
        body = bytes(memoryview(received)[HEADER.size : end])
        del received[:end]
        return Frame(number, body)
