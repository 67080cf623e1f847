"""Expose, read one-sidedly, confirm, release. Versions and epochs fence stale readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np


class Region(msgspec.Struct, frozen=True):
    """One named array inside an exposure."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


class Exposure(msgspec.Struct, frozen=True):
    """Where and what to read; small, sent over the control plane."""

    transport: str
    """`shm`, `tcp` or `mooncake`."""
    location: str
    """Segment name or address; only the transport reads it."""
    regions: tuple[Region, ...]
    version: int
    incarnation: int
    num_bytes: int
    others: tuple[Exposure, ...] = ()
    """Weights of a cell of several ranks lie in one exposure per rank: this one of rank 0, and those of the others after it."""


Pieces = np.ndarray | list[np.ndarray]
"""One array, or several that follow one another along the first axis: gathered by `expose`, scattered by `read`."""


class Transport(Protocol):
    """One per process. Not thread-safe unless the transport says so."""

    def expose(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        """Allocate memory that others can read, copy `arrays` in and announce it."""
        ...

    def reserve(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        """Like `expose`, of the shapes and dtypes alone: fenced until the owner has filled `buffers` and called `republish`."""
        ...

    def buffers(self, exposure: Exposure) -> dict[str, np.ndarray]:
        """The writable arrays behind an exposure of this process."""
        ...

    def republish(self, exposure: Exposure, *, version: int) -> Exposure:
        """After the owner rewrote `buffers` under `begin_write`: the same memory under a new version."""
        ...

    def begin_write(self, exposure: Exposure) -> None:
        """Fence readers before the owner changes the bytes: a read that overlaps raises StaleRead."""
        ...

    def read(self, exposure: Exposure, into: Mapping[str, Pieces] | None = None) -> dict[str, np.ndarray]:
        """Read all regions, or those named in `into`, without the owner's help; return the arrays, by region: all but those in pieces.

        Raises StaleRead when version or incarnation changed before or during the read, or the memory was released;
        TransferError when the owner cannot be reached within the deadline.
        """
        ...

    def view(self, exposure: Exposure) -> dict[str, np.ndarray] | None:
        """All regions where they lie, read-only, not copied; None from a transport that cannot. Raises StaleRead as `read` does.

        Only for what is never republished. The bytes stay as long as the arrays do, even when the owner releases them or dies.
        """
        ...

    def release(self, exposure: Exposure) -> None:
        """Free the memory at the owner. Later reads raise StaleRead. Releasing twice is harmless."""
        ...

    def close(self) -> None: ...
