"""CPU seconds and peak memory of one piece of work, in this process."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import msgspec


class Timing(msgspec.Struct, frozen=True):
    cpu_s: float
    """Process CPU time: what other programs do on the machine does not count."""
    peak_mb: float
    """Highest resident memory above what was resident before."""


def measure(work: Callable[[], object]) -> Timing:
    """Linux only: resets the high-water mark of resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = _resident_kb("VmRSS"), time.process_time()
    work()
    cpu_s = time.process_time() - started
    return Timing(cpu_s, (_resident_kb("VmHWM") - before) / 1024)


def _resident_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory can only be measured on Linux")
