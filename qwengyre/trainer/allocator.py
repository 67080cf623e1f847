"""Whether freed memory stays with the process while it trains.

glibc maps every large array anew and unmaps it when it is freed: a micro-step of a small model then spends a tenth of its time
in page faults. While a cell trains, freed memory is kept for the next micro-step; when it leaves training it is given back.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""


def keep_freed() -> None:
    _set(mmap_threshold=1 << 30, trim_threshold=(1 << 31) - 1, top_pad=16 << 20)


def give_back_freed() -> None:
    _set(mmap_threshold=128 << 10, trim_threshold=128 << 10, top_pad=0)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _set(*, mmap_threshold: int, trim_threshold: int, top_pad: int) -> None:
    """Does nothing on a C library without mallopt."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, mmap_threshold)
        libc.mallopt(TRIM_THRESHOLD, trim_threshold)
        libc.mallopt(TOP_PAD, top_pad)
