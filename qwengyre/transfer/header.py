"""The header of exposed memory, which fences readers: taken before and after the bytes, it makes a torn read impossible. Pure.

mark u64 | incarnation i64 | version i64 | sequence u64 | released u64      in 64 bytes
mark      tells this exposure from whatever else may lie there
sequence  even: the bytes are at rest. odd: the owner is writing (`begin_write` .. `republish`)
"""

from __future__ import annotations

import struct

from qwengyre.core.errors import StaleRead
from qwengyre.transfer.api import Exposure

HEADER = struct.Struct("<QqqQQ")
HEADER_BYTES = 64


class Fence:
    """What the owner writes into the header."""

    def __init__(self, mark: int, *, version: int, incarnation: int):
        self.mark, self.version, self.incarnation, self.sequence, self.is_released = mark, version, incarnation, 1, False

    def begin_write(self) -> bytes:
        self.sequence |= 1
        return self.packed()

    def rest(self, version: int) -> bytes:
        self.version, self.sequence = version, (self.sequence | 1) + 1
        return self.packed()

    def release(self) -> bytes:
        self.is_released = True
        return self.begin_write()

    def packed(self) -> bytes:
        return HEADER.pack(self.mark, self.incarnation, self.version, self.sequence, self.is_released)


def check_fence(header: bytes, mark: int, exposure: Exposure) -> None:
    """Raises StaleRead unless the bytes after `header` are those of `exposure`, and at rest."""
    if len(header) < HEADER.size:
        raise StaleRead(f"{exposure.location} is being made or was cut")
    found, incarnation, version, sequence, released = HEADER.unpack(header)
    if found != mark or released:
        raise StaleRead(f"{exposure.location} was released")
    if (incarnation, version) != (exposure.incarnation, exposure.version):
        raise StaleRead(
            f"{exposure.location} holds version {version} of incarnation {incarnation}, not {exposure.version} of {exposure.incarnation}"
        )
    if sequence % 2:
        raise StaleRead(f"{exposure.location} is being written")
