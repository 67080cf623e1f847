"""Transfer on one host: POSIX shared memory, one file of /dev/shm per exposure.

A segment is a header and the data. The owner maps it and writes; a reader opens the file and reads it with the owner none
the wiser. Reading by file descriptor, not by mapping, keeps a reader from crashing when a segment is cut and from pinning
memory that the owner has released.

    header   magic u64 | epoch i64 | version i64 | sequence u64 | released u64      64 bytes
    sequence even: the bytes are at rest. odd: the owner is writing (`begin_write` .. `republish`).

A read takes the header before and after the bytes. They must be equal, at rest, unreleased, and of the exposure's
epoch and version; else StaleRead. So a torn read cannot be returned.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import struct
import threading
from pathlib import Path

import msgspec
import numpy as np

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.transfer.api import Exposure, Region
from qwengyre.transfer.layout import as_bytes, destinations, lay_out, views

SHM_DIR = Path("/dev/shm")
HEADER = struct.Struct("<QqqQQ")
HEADER_BYTES = 64
MAGIC = 0x51574E4759524531
MAX_READ_BYTES = 1 << 30


class _Segment:
    """One segment of this process, as its owner sees it."""

    def __init__(self, path: Path, num_bytes: int, *, version: int, epoch: int):
        self.path, self.version, self.epoch, self.sequence, self.released = path, version, epoch, 1, False
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES + num_bytes)
            self.memory = mmap.mmap(fd, HEADER_BYTES + num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                raise TransferError(f"{SHM_DIR} has no room for {num_bytes} bytes: enlarge it or expose less") from error
            raise
        finally:
            os.close(fd)
        self.write_header()

    def write_header(self) -> None:
        HEADER.pack_into(self.memory, 0, MAGIC, self.epoch, self.version, self.sequence, self.released)

    def data(self) -> memoryview:
        return memoryview(self.memory)[HEADER_BYTES:]


class ShmCarrier:
    """Carrier over shared memory. Thread-safe; an owner's `buffers` belong to one writer.

    Segments are named `<prefix>-<pid>-<n>-<random>`; `cleanup(prefix)` removes what killed processes left.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._segments: dict[str, _Segment] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def expose(self, arrays: dict[str, np.ndarray], *, version: int, epoch: int) -> Exposure:
        exposure = self.reserve(arrays, version=version, epoch=epoch)
        for name, view in self.buffers(exposure).items():
            np.copyto(view, arrays[name])
        return self.republish(exposure, version=version)

    def reserve(self, arrays: dict[str, np.ndarray], *, version: int, epoch: int) -> Exposure:
        regions, num_bytes = lay_out(arrays)
        name = f"{self.prefix}-{os.getpid()}-{next(self._numbers)}-{secrets.token_hex(4)}"
        segment = _Segment(SHM_DIR / name, num_bytes, version=version, epoch=epoch)
        with self._lock:
            self._segments[name] = segment
        return Exposure("shm", name, regions, version, epoch, num_bytes)

    def buffers(self, exposure: Exposure) -> dict[str, np.ndarray]:
        return views(exposure.regions, self._own(exposure).data())

    def begin_write(self, exposure: Exposure) -> None:
        segment = self._own(exposure)
        segment.sequence |= 1
        segment.write_header()

    def republish(self, exposure: Exposure, *, version: int) -> Exposure:
        segment = self._own(exposure)
        segment.version, segment.sequence = version, (segment.sequence | 1) + 1
        segment.write_header()
        return msgspec.structs.replace(exposure, version=version)

    def read(self, exposure: Exposure, into: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        targets = destinations(exposure, into)
        try:
            fd = os.open(SHM_DIR / exposure.location, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StaleRead(f"{exposure.location} was released") from None
        try:
            before = _check_header(fd, exposure)
            for region, array in targets.items():
                _read_region(fd, region, array, exposure)
            if _check_header(fd, exposure) != before:
                raise StaleRead(f"{exposure.location} was rewritten during the read")
        finally:
            os.close(fd)
        return {region.name: array for region, array in targets.items()}

    def release(self, exposure: Exposure) -> None:
        with self._lock:
            segment = self._segments.pop(exposure.location, None)
        if segment is None:
            return
        segment.released = True
        segment.sequence |= 1
        segment.write_header()
        segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        for name in list(self._segments):
            self.release(Exposure("shm", name, (), 0, 0, 0))

    def num_bytes_exposed(self) -> int:
        with self._lock:
            return sum(len(segment.memory) for segment in self._segments.values())

    def _own(self, exposure: Exposure) -> _Segment:
        try:
            return self._segments[exposure.location]
        except KeyError:
            raise TransferError(f"{exposure.location} is not exposed by this process") from None


def cleanup(prefix: str) -> int:
    """Remove the segments of every process of a run, dead ones included; return how many there were."""
    paths = list(SHM_DIR.glob(f"{prefix}-*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _check_header(fd: int, exposure: Exposure) -> bytes:
    header = os.pread(fd, HEADER.size, 0)
    if len(header) < HEADER.size:
        raise StaleRead(f"{exposure.location} is being made or was cut")
    magic, epoch, version, sequence, released = HEADER.unpack(header)
    if magic != MAGIC or released:
        raise StaleRead(f"{exposure.location} was released")
    if (epoch, version) != (exposure.epoch, exposure.version):
        raise StaleRead(
            f"{exposure.location} holds version {version} of epoch {epoch}, not {exposure.version} of {exposure.epoch}"
        )
    if sequence % 2:
        raise StaleRead(f"{exposure.location} is being written")
    return header


def _read_region(fd: int, region: Region, array: np.ndarray, exposure: Exposure) -> None:
    target, done = as_bytes(array), 0
    while done < region.num_bytes:
        stop = min(done + MAX_READ_BYTES, region.num_bytes)
        num_read = os.preadv(fd, [target[done:stop]], HEADER_BYTES + region.offset + done)
        if num_read == 0:
            raise StaleRead(f"{exposure.location} ends before region {region.name!r}")
        done += num_read
