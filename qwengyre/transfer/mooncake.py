"""Transfer over the Mooncake Transfer Engine: RDMA where there is an HCA, TCP elsewhere. Needs the extra `mooncake`.

An exposure is registered memory and a header (`transfer/header.py`) in a slot of a slab that stays registered as long as the
process lives. So a reader can always tell memory that was released (its slot says so) from an owner that is gone.

Released memory is unregistered at once, which refuses new reads, and freed `LINGER_S` later, when no read that had begun can
still be at it.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.transfer.api import Exposure, Pieces, Region
from qwengyre.transfer.header import HEADER, HEADER_BYTES, Fence, check_fence
from qwengyre.transfer.layout import copy_pieces, destinations, lay_out, pieces_of, views, whole_arrays

HCA_DIR: Final = Path("/sys/class/infiniband")
NUM_SLOTS: Final = 4096
"""Exposures and reads that one process may have at once."""
LINGER_S: Final = 10.0  # more than three times PROGRESS_TIMEOUT_S
PROGRESS_TIMEOUT_S: Final = 3
"""Mooncake gives up a TCP transfer that does not move for so long."""
SETTINGS: Final = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_TIMEOUT_S),
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "8192",
    "GLOG_minloglevel": "3",
}
"""Mooncake reads them when it is first loaded; what the user has set stays."""


class _Place(NamedTuple):
    """`Exposure.location`, taken apart."""

    server: str
    mark: int
    header: int
    data: int

    def __str__(self) -> str:
        return f"{self.server}/{self.mark:x}/{self.header:x}/{self.data:x}"

    @classmethod
    def parse(cls, location: str) -> _Place:
        server, *numbers = location.split("/")
        mark, header, data = (int(number, 16) for number in numbers)
        return cls(server, mark, header, data)


class _Segment(NamedTuple):
    memory: np.ndarray
    slot: int
    fence: Fence


class MooncakeTransport:
    """Transport over Mooncake. Thread-safe; an owner's `buffers` belong to one writer.

    Mooncake listens on all interfaces, whatever `host` says; `host` is what it tells readers. Traffic is not encrypted.
    Raises TransferError when the package is missing, or for "rdma" on a host without an HCA.
    """

    def __init__(self, host: str = "127.0.0.1", *, protocol: Literal["tcp", "rdma"] = "tcp", device: str = ""):
        if protocol == "rdma" and not hcas():
            raise TransferError(
                f'transfer.mooncake_protocol is "rdma", but this host has no HCA ({HCA_DIR} is empty or missing). '
                'Mooncake would silently use TCP: say "tcp" if that is meant'
            )
        self._engine = _load()()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransferError(f"Mooncake does not start on {host} with {protocol} {device}".rstrip())
        self._server = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._segments: dict[str, _Segment] = {}
        self._slab = np.zeros((NUM_SLOTS, HEADER_BYTES), np.uint8)
        self._free_slots = list(range(NUM_SLOTS))
        self._lingering: deque[tuple[float, _Segment]] = deque()
        self._register([self._slab])

    def expose(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        exposure = self.reserve(arrays, version=version, incarnation=incarnation)
        for name, view in self.buffers(exposure).items():
            copy_pieces(view, arrays[name])
        return self.republish(exposure, version=version)

    def reserve(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        self._free_lingering()
        regions, num_bytes = lay_out(arrays)
        memory = np.empty(max(1, num_bytes), np.uint8)
        fence = Fence(secrets.randbits(63), version=version, incarnation=incarnation)
        segment = _Segment(memory, self._take_slot(), fence)
        self._write_header(segment, fence.packed())
        self._register([memory])
        location = str(_Place(self._server, fence.mark, self._slab[segment.slot].ctypes.data, memory.ctypes.data))
        with self._lock:
            self._segments[location] = segment
        return Exposure("mooncake", location, regions, version, incarnation, num_bytes)

    def buffers(self, exposure: Exposure) -> dict[str, np.ndarray]:
        return views(exposure.regions, self._own(exposure).memory.data)

    def begin_write(self, exposure: Exposure) -> None:
        segment = self._own(exposure)
        self._write_header(segment, segment.fence.begin_write())

    def republish(self, exposure: Exposure, *, version: int) -> Exposure:
        segment = self._own(exposure)
        self._write_header(segment, segment.fence.rest(version))
        return msgspec.structs.replace(exposure, version=version)

    def read(self, exposure: Exposure, into: Mapping[str, Pieces] | None = None) -> dict[str, np.ndarray]:
        targets = destinations(exposure, into)
        place = _Place.parse(exposure.location)
        before = self._checked_header(place, exposure)
        is_whole = self._fetch(place, targets)
        if self._checked_header(place, exposure) != before:
            raise StaleRead(f"{exposure.location} was rewritten during the read")
        if not is_whole:
            raise TransferError(f"{place.server} did not send all of {exposure.num_bytes} bytes")
        return whole_arrays(targets)

    def view(self, exposure: Exposure) -> None:
        """Never: the bytes lie elsewhere."""

    def release(self, exposure: Exposure) -> None:
        with self._lock:
            segment = self._segments.pop(exposure.location, None)
        if segment is not None:
            self._retire(segment)
        self._free_lingering()

    def close(self) -> None:
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        for segment in segments:
            self._retire(segment)

    def _retire(self, segment: _Segment) -> None:
        self._write_header(segment, segment.fence.release())
        self._unregister([segment.memory])
        with self._lock:
            self._lingering.append((time.monotonic() + LINGER_S, segment))

    def _free_lingering(self) -> None:
        with self._lock:
            while self._lingering and self._lingering[0][0] < time.monotonic():
                self._free_slots.append(self._lingering.popleft()[1].slot)

    def _own(self, exposure: Exposure) -> _Segment:
        try:
            return self._segments[exposure.location]
        except KeyError:
            raise TransferError(f"{exposure.location} is not exposed by this process") from None

    def _write_header(self, segment: _Segment, header: bytes) -> None:
        self._slab[segment.slot, : HEADER.size] = np.frombuffer(header, np.uint8)

    def _take_slot(self) -> int:
        with self._lock:
            if not self._free_slots:
                raise TransferError(f"this process has {NUM_SLOTS} exposures and reads, the most that it may: release some")
            return self._free_slots.pop()

    def _checked_header(self, place: _Place, exposure: Exposure) -> bytes:
        """Raises StaleRead when it is not the exposure's, TransferError when the owner does not answer."""
        slot = self._take_slot()
        try:
            target = self._slab[slot]
            if self._engine.transfer_sync_read(place.server, target.ctypes.data, place.header, HEADER_BYTES):
                raise TransferError(f"{place.server} cannot be read: its process is gone or does not answer")
            header: bytes = target[: HEADER.size].tobytes()
        finally:
            with self._lock:
                self._free_slots.append(slot)
        check_fence(header, place.mark, exposure)
        return header

    def _fetch(self, place: _Place, targets: dict[Region, Pieces]) -> bool:
        """Read the regions in one batch; False when Mooncake says that something was refused or lost."""
        arrays, addresses = [], []
        for region, value in targets.items():
            at = place.data + region.offset
            for piece in pieces_of(value):
                if piece.nbytes:
                    arrays.append(piece)
                    addresses.append(at)
                    at += piece.nbytes
        if not arrays:
            return True
        with self._registered(arrays):
            return not self._engine.batch_transfer_sync_read(
                place.server, [array.ctypes.data for array in arrays], addresses, [array.nbytes for array in arrays]
            )

    @contextmanager
    def _registered(self, arrays: list[np.ndarray]) -> Iterator[None]:
        """What lies in an exposure of ours, as a copy that is held to be served on, is registered already; Mooncake refuses it twice."""
        others = [array for array in arrays if not self._is_exposed(array)]
        if others:
            self._register(others)
        try:
            yield
        finally:
            if others:
                self._unregister(others)

    def _is_exposed(self, array: np.ndarray) -> bool:
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        with self._lock:
            exposed = [(segment.memory.ctypes.data, segment.memory.nbytes) for segment in self._segments.values()]
        return any(at <= start and end <= at + num_bytes for at, num_bytes in exposed)

    def _register(self, arrays: list[np.ndarray]) -> None:
        if self._engine.batch_register_memory([array.ctypes.data for array in arrays], [array.nbytes for array in arrays]):
            raise TransferError(f"Mooncake cannot register {sum(array.nbytes for array in arrays)} bytes of memory")

    def _unregister(self, arrays: list[np.ndarray]) -> None:
        self._engine.batch_unregister_memory([array.ctypes.data for array in arrays])


def hcas() -> list[str]:
    """Names of the RDMA devices of this host."""
    return sorted(path.name for path in HCA_DIR.iterdir()) if HCA_DIR.is_dir() else []


def _load() -> Any:
    """Mooncake's engine class. Raises TransferError when it is not installed."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransferError(
            f"the mooncake transport cannot be loaded ({error}): install qwengyre's extra `mooncake`, "
            "and the system library libibverbs1 (Debian: apt-get install libibverbs1)"
        ) from error
    return TransferEngine
