"""Transfer on one host: POSIX shared memory, one file of /dev/shm per exposure.

A segment is a header (`transfer/header.py`) and the data. A reader opens the file and reads it without the owner.
Reading by file descriptor, not by mapping, keeps a reader from pinning memory that the owner has released; `view` is for those who
want just that.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.transfer.api import Exposure, Pieces
from qwengyre.transfer.header import HEADER, HEADER_BYTES, Fence, check_fence
from qwengyre.transfer.layout import as_bytes, destinations, lay_out, pieces_of, views, whole_arrays

SHM_DIR = Path("/dev/shm")
MAGIC = 0x51574E4759524531
MAX_PIECES = 1024
"""Linux takes no more in one call (IOV_MAX)."""


class _Segment:
    """One segment of this process, as its owner sees it."""

    def __init__(self, path: Path, num_bytes: int, *, version: int, incarnation: int):
        self.path, self.fence = path, Fence(MAGIC, version=version, incarnation=incarnation)
        self.num_bytes = HEADER_BYTES + num_bytes
        self._memory: mmap.mmap | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.write_header(self.fence.packed())

    def write_header(self, header: bytes) -> None:
        os.pwrite(self._fd, header, 0)

    def allocate(self) -> None:
        """Take all memory now: a page that is missing when it is touched would be a SIGBUS. Raises TransferError."""
        with self._room():
            os.posix_fallocate(self._fd, 0, self.num_bytes)

    def fill(self, contents: Iterable[tuple[int, list[memoryview]]]) -> None:
        """Take memory by writing (offset, pieces): half the cost of touching a fresh mapping. Raises TransferError."""
        with self._room():
            free = os.fstatvfs(self._fd)
            if free.f_blocks and free.f_bavail * free.f_frsize < self.num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.truncate(self._fd, self.num_bytes)
            for offset, pieces in contents:
                _in_batches(os.pwritev, self._fd, pieces, HEADER_BYTES + offset)

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno == errno.ENOSPC:
                raise TransferError(f"{SHM_DIR} has no room for {self.num_bytes} bytes: enlarge it or expose less") from error
            raise

    def data(self) -> memoryview:
        """The bytes after the header, mapped at first use."""
        if self._memory is None:
            self._memory = mmap.mmap(self._fd, self.num_bytes)
        return memoryview(self._memory)[HEADER_BYTES:]

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


class ShmTransport:
    """Transport over shared memory. Thread-safe; an owner's `buffers` belong to one writer.

    Segments are named `<prefix>-<pid>-<n>-<random>`; `cleanup(prefix)` removes what killed processes left.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._segments: dict[str, _Segment] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def expose(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        exposure, segment = _make(self._new_name(), arrays, version=version, incarnation=incarnation)
        segment.fill(
            (region.offset, [as_bytes(np.ascontiguousarray(piece)) for piece in pieces_of(arrays[region.name])])
            for region in exposure.regions
        )
        self._keep(segment)
        return self.republish(exposure, version=version)

    def reserve(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        exposure, segment = _make(self._new_name(), arrays, version=version, incarnation=incarnation)
        segment.allocate()
        self._keep(segment)
        return exposure

    def buffers(self, exposure: Exposure) -> dict[str, np.ndarray]:
        return views(exposure.regions, self._own(exposure).data())

    def begin_write(self, exposure: Exposure) -> None:
        segment = self._own(exposure)
        segment.write_header(segment.fence.begin_write())

    def republish(self, exposure: Exposure, *, version: int) -> Exposure:
        segment = self._own(exposure)
        segment.write_header(segment.fence.rest(version))
        return msgspec.structs.replace(exposure, version=version)

    def read(self, exposure: Exposure, into: Mapping[str, Pieces] | None = None) -> dict[str, np.ndarray]:
        targets = destinations(exposure, into)
        with _fenced(exposure) as fd:
            for region, value in targets.items():
                pieces = [as_bytes(piece) for piece in pieces_of(value)]
                if _in_batches(os.preadv, fd, pieces, HEADER_BYTES + region.offset) < region.num_bytes:
                    raise StaleRead(f"{exposure.location} ends before region {region.name!r}")
        return whole_arrays(targets)

    def view(self, exposure: Exposure) -> dict[str, np.ndarray]:
        with _fenced(exposure) as fd:
            num_bytes = HEADER_BYTES + max(region.offset + region.num_bytes for region in exposure.regions)
            if os.fstat(fd).st_size < num_bytes:
                raise StaleRead(f"{exposure.location} ends before its last region")
            memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return views(exposure.regions, memoryview(memory)[HEADER_BYTES:])

    def release(self, exposure: Exposure) -> None:
        with self._lock:
            segment = self._segments.pop(exposure.location, None)
        if segment is None:
            return
        segment.write_header(segment.fence.release())
        segment.close()

    def close(self) -> None:
        for name in list(self._segments):
            self.release(Exposure("shm", name, (), 0, 0, 0))

    def _new_name(self) -> str:
        return f"{self.prefix}-{os.getpid()}-{next(self._numbers)}-{secrets.token_hex(4)}"

    def _keep(self, segment: _Segment) -> None:
        with self._lock:
            self._segments[segment.path.name] = segment

    def _own(self, exposure: Exposure) -> _Segment:
        try:
            return self._segments[exposure.location]
        except KeyError:
            raise TransferError(f"{exposure.location} is not exposed by this process") from None


def cleanup(prefix: str) -> int:
    """Remove the segments of every process of a run, dead ones included; return how many there were.

    Whatever else has such a name (a folder, a link, a file of another user) is not ours, and is passed over.
    """
    num_removed = 0
    for path in SHM_DIR.glob(f"{prefix}-*"):
        with suppress(FileNotFoundError, PermissionError):
            if _is_own(path.lstat()):
                path.unlink()
                num_removed += 1
    return num_removed


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _make(name: str, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> tuple[Exposure, _Segment]:
    regions, num_bytes = lay_out(arrays)
    segment = _Segment(SHM_DIR / name, num_bytes, version=version, incarnation=incarnation)
    return Exposure("shm", name, regions, version, incarnation, num_bytes), segment


@contextmanager
def _fenced(exposure: Exposure) -> Iterator[int]:
    """The segment's file, open. Raises StaleRead when it is not that exposure's, before or after what is done with it."""
    try:
        fd = os.open(SHM_DIR / exposure.location, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StaleRead(f"{exposure.location} was released") from None
    except OSError as error:
        raise StaleRead(f"{exposure.location} is not a segment of this run: {error.strerror}") from None
    try:
        if not _is_own(os.fstat(fd)):
            raise StaleRead(f"{exposure.location} is not a segment of this run: somebody else made it")
        before = _check_header(fd, exposure)
        yield fd
        if _check_header(fd, exposure) != before:
            raise StaleRead(f"{exposure.location} was rewritten during the read")
    finally:
        os.close(fd)


def _check_header(fd: int, exposure: Exposure) -> bytes:
    header = os.pread(fd, HEADER.size, 0)
    check_fence(header, MAGIC, exposure)
    return header


def _in_batches(move: Callable[[int, list[memoryview], int], int], fd: int, pieces: list[memoryview], offset: int) -> int:
    """preadv or pwritev of all pieces, however many and however large; return the number of bytes until the file ended."""
    left, done = [piece for piece in pieces if len(piece)], 0
    while left:
        moved = move(fd, left[:MAX_PIECES], offset + done)
        if moved == 0:
            break
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
    return done
