"""Segments of shared memory: names, cleaning up, and files that are not whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import StaleRead, TransferError
from qwengyre.runtime.train import segment_prefix
from qwengyre.transfer.shm import SHM_DIR, ShmTransport, cleanup


def segments(prefix: str) -> list[Path]:
    return list(SHM_DIR.glob(f"{prefix}-*"))


def test_release_and_close_leave_no_file(prefix):
    transport = ShmTransport(prefix)
    first, _second = (transport.expose({"x": np.arange(3)}, version=0, incarnation=0) for _ in range(2))
    assert len(segments(prefix)) == 2
    transport.release(first)
    assert len(segments(prefix)) == 1
    transport.close()
    assert segments(prefix) == []


def test_cleanup_takes_the_segments_of_one_run_only(prefix):
    ShmTransport(prefix).expose({"x": np.arange(3)}, version=0, incarnation=0)
    other = ShmTransport(f"{prefix}x")
    exposure = other.expose({"x": np.arange(3)}, version=0, incarnation=0)
    assert cleanup(prefix) == 1
    np.testing.assert_array_equal(other.read(exposure)["x"], np.arange(3))
    other.close()


@pytest.mark.parametrize("size", [0, 8, 40, 64, 70])
def test_a_file_that_was_cut_is_stale_not_a_crash(prefix, size):
    transport = ShmTransport(prefix)
    exposure = transport.expose({"x": np.arange(3)}, version=0, incarnation=0)
    os.truncate(SHM_DIR / exposure.location, size)
    with pytest.raises(StaleRead):
        ShmTransport(prefix).read(exposure)


def test_no_room_is_an_error_that_says_so(prefix):
    transport = ShmTransport(prefix)
    with pytest.raises(TransferError, match="no room"):
        transport.expose({"x": np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 42,), (0,))}, version=0, incarnation=0)
    assert segments(prefix) == []


def test_a_name_of_another_run_is_stale(prefix):
    transport = ShmTransport(prefix)
    exposure = transport.expose({"x": np.arange(3)}, version=0, incarnation=0)
    with pytest.raises(StaleRead):
        transport.read(msgspec.structs.replace(exposure, location=f"{prefix}-0-0-none"))
    transport.close()


@pytest.mark.parametrize("foreign", ["folder", "full folder", "link", "dangling link", "pipe", "file of another user"])
def test_what_is_not_ours_is_passed_over(prefix, foreign, monkeypatch, tmp_path):
    """A cleanup at the start and at the end of a run must neither fail on it nor remove it."""
    place = SHM_DIR / f"{prefix}-1-0-foreign"
    (tmp_path / "kept").touch()
    owner = os.geteuid()
    match foreign:
        case "folder" | "full folder":
            (place / "inner").mkdir(parents=True) if foreign == "full folder" else place.mkdir()
        case "link" | "dangling link":
            place.symlink_to(tmp_path / ("kept" if foreign == "link" else "nowhere"))
        case "pipe":
            os.mkfifo(place)
        case _:
            place.touch()
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    try:
        assert cleanup(prefix) == 0 and os.path.lexists(place)
        monkeypatch.setattr(os, "geteuid", lambda: owner)
        transport = ShmTransport(prefix)
        exposure = transport.expose({"x": np.arange(3)}, version=0, incarnation=0)
        if foreign == "file of another user":
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        for location in (place.name, *([exposure.location] if foreign == "file of another user" else ())):
            with pytest.raises(StaleRead, match=r"not a segment of this run|was released"):
                ShmTransport(prefix).read(msgspec.structs.replace(exposure, location=location))
        monkeypatch.setattr(os, "geteuid", lambda: owner)
        transport.close()
    finally:
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    assert (tmp_path / "kept").exists()


def test_the_name_of_a_runs_memory_is_drawn_once_and_kept_by_its_owner_alone(tmp_path):
    names = set()
    for run in ("a", "b"):
        (tmp_path / run / "journal").mkdir(parents=True)
        assert segment_prefix(tmp_path / run) == segment_prefix(tmp_path / run)
        names.add(segment_prefix(tmp_path / run))
    (tmp_path / "a").rename(tmp_path / "moved")
    assert segment_prefix(tmp_path / "moved") in names and len(names) == 2
    kept = tmp_path / "b/journal/segments"
    assert kept.stat().st_mode & 0o077 == 0
    kept.write_text("../../etc")
    assert segment_prefix(tmp_path / "b") not in names
