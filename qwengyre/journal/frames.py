"""The journal's bytes: a file header, then frames of mark, length, checksum and payload (little-endian).

    header  16 bytes   "QWENGYRE" "JOURNAL" 0x01
    frame   12 bytes   mark u32 · length u32 · checksum u32, then `length` bytes of msgpack (one tagged Struct)

The checksum covers the frame's own offset, its length and its payload. So a frame is valid only where it was written:
bytes of a frame inside another payload, or a shifted block, never pass for a record. The mark lets a reader find the next
frame after damage without trying every byte.
"""

from __future__ import annotations

from struct import Struct
from typing import Final
from zlib import crc32

HEADER: Final = b"QWENGYREJOURNAL\x01"
MARK: Final = b"\xf7QG\xa6"
MAX_PAYLOAD_BYTES: Final = 1 << 30  # a longer length can only be damage

_PREFIX: Final = Struct("<4sII")
_PLACE: Final = Struct("<QI")
PREFIX_BYTES: Final = _PREFIX.size


def frame(payload: bytes, offset: int) -> bytes:
    """The bytes of one record that starts at byte `offset` of the file."""
    length = len(payload)
    return _PREFIX.pack(MARK, length, _checksum(payload, offset)) + payload


def payload_length(prefix: bytes) -> int | None:
    """How many payload bytes follow this frame prefix; None if it is not a prefix."""
    if len(prefix) < PREFIX_BYTES:
        return None
    mark, length, _ = _PREFIX.unpack_from(prefix)
    return length if mark == MARK and length <= MAX_PAYLOAD_BYTES else None


def is_intact(prefix: bytes, payload: bytes, offset: int) -> bool:
    """Whether this frame is whole and was written at `offset`."""
    _, length, checksum = _PREFIX.unpack_from(prefix)
    return bool(length == len(payload) and checksum == _checksum(payload, offset))


def next_intact(data: bytes, base: int) -> int | None:
    """Offset in the file of the first intact frame in `data`, the file's bytes from `base` on; None without one."""
    at = data.find(MARK)
    while at >= 0:
        length = payload_length(data[at : at + PREFIX_BYTES])
        if length is not None:
            start = at + PREFIX_BYTES
            payload = data[start : start + length]
            if is_intact(data[at:start], payload, base + at):
                return base + at
        at = data.find(MARK, at + 1)
    return None


def _checksum(payload: bytes, offset: int) -> int:
    return crc32(payload, crc32(_PLACE.pack(offset, len(payload))))
