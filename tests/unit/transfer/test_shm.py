"""Segments of shared memory: names, cleaning up, and files that are not whole."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.transfer.shm import SHM_DIR, ShmCarrier, cleanup


def segments(prefix: str) -> list[Path]:
    return list(SHM_DIR.glob(f"{prefix}-*"))


def test_release_and_close_leave_no_file(prefix):
    carrier = ShmCarrier(prefix)
    first, _second = (carrier.expose({"x": np.arange(3)}, version=0, epoch=0) for _ in range(2))
    assert len(segments(prefix)) == 2
    carrier.release(first)
    assert len(segments(prefix)) == 1
    carrier.close()
    assert segments(prefix) == []


def test_cleanup_takes_the_segments_of_one_run_only(prefix):
    ShmCarrier(prefix).expose({"x": np.arange(3)}, version=0, epoch=0)
    other = ShmCarrier(f"{prefix}x")
    exposure = other.expose({"x": np.arange(3)}, version=0, epoch=0)
    assert cleanup(prefix) == 1
    np.testing.assert_array_equal(other.read(exposure)["x"], np.arange(3))
    other.close()


@pytest.mark.parametrize("size", [0, 8, 40, 64, 70])
def test_a_file_that_was_cut_is_stale_not_a_crash(prefix, size):
    carrier = ShmCarrier(prefix)
    exposure = carrier.expose({"x": np.arange(3)}, version=0, epoch=0)
    os.truncate(SHM_DIR / exposure.location, size)
    with pytest.raises(StaleRead):
        ShmCarrier(prefix).read(exposure)


def test_no_room_is_an_error_that_says_so(prefix):
    carrier = ShmCarrier(prefix)
    with pytest.raises(TransferError, match="no room"):
        carrier.expose({"x": np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 42,), (0,))}, version=0, epoch=0)
    assert segments(prefix) == []


def test_a_name_of_another_run_is_stale(prefix):
    carrier = ShmCarrier(prefix)
    exposure = carrier.expose({"x": np.arange(3)}, version=0, epoch=0)
    with pytest.raises(StaleRead):
        carrier.read(msgspec.structs.replace(exposure, location=f"{prefix}-0-0-none"))
    carrier.close()
