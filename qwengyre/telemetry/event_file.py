"""TensorBoard event files of scalars, written without TensorBoard, torch or protobuf: they take seconds to import.

A file is a sequence of TFRecords: length u64, masked CRC-32C of the length, payload, masked CRC-32C of the payload.
The payload is an `Event` message (tensorboard/compat/proto/event.proto): wall_time = 1, step = 2, file_version = 3,
summary = 5 { value = 1 { tag = 1, simple_value = 2 } }; a text has tensor = 8 and metadata = 9 in place of the number.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path


class EventFile:
    """Appends scalars to one new event file in `folder`. TensorBoard reads all files of a folder as one run."""

    def __init__(self, folder: str | Path, *, wall_time: float):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{wall_time:.6f}.qwengyre.{os.getpid()}"
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._write(_double(1, wall_time) + _bytes(3, b"brain.Event:2"))

    def add(self, values: Mapping[str, float], *, step: int, wall_time: float) -> None:
        """One event with all `values` at `step`."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_double(1, wall_time) + _varint(2 << 3) + _varint(step) + _bytes(5, summary))

    def add_text(self, tag: str, text: str, *, step: int, wall_time: float) -> None:
        """A text in Markdown, as TensorBoard's text page shows it: a tensor of one string (type 7) for the plugin `text`."""
        shape = _bytes(2, _varint(1 << 3) + _varint(1))
        tensor = _varint(1 << 3) + _varint(7) + _bytes(2, shape) + _bytes(8, text.encode("utf-8", errors="replace"))
        metadata = _bytes(1, _bytes(1, b"text"))
        value = _bytes(1, tag.encode()) + _bytes(9, metadata) + _bytes(8, tensor)
        self._write(_double(1, wall_time) + _varint(2 << 3) + _varint(step) + _bytes(5, _bytes(1, value)))

    def close(self) -> None:
        self._file.close()

    def _write(self, payload: bytes) -> None:
        length = struct.pack("<Q", len(payload))
        self._file.write(length + _masked_crc(length) + payload + _masked_crc(payload))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli).

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
