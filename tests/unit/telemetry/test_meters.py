from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwengyre.telemetry.meters import MemoryMeter, WorkMeter


def process(proc: Path, pid: int, parent: int, pss_kb: int | None, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1")
    if pss_kb is not None:
        (folder / "smaps_rollup").write_text(
            f"5581-7ffe ---p 00 00:00 0 [rollup]\nRss: 99 kB\nPss:          {pss_kb} kB\nPss_Dirty: 7 kB\n"
        )


def test_the_tree_below_the_root_is_summed_and_nothing_else(tmp_path: Path):
    process(tmp_path, 10, 1, 100)
    process(tmp_path, 11, 10, 20, name="cell (0) x")
    process(tmp_path, 12, 11, 3)
    process(tmp_path, 13, 1, 1000)
    process(tmp_path, 14, 10, None)
    (tmp_path / "meminfo").write_text("")
    assert MemoryMeter(10, tmp_path).sample() == 123 * 1024


def test_the_peak_outlives_the_processes(tmp_path: Path):
    process(tmp_path, 10, 1, 100)
    meter = MemoryMeter(10, tmp_path)
    meter.sample()
    (tmp_path / "10" / "smaps_rollup").unlink()
    assert (meter.sample(), meter.peak_bytes) == (0, 100 * 1024)


def test_a_process_that_is_sealed_counts_its_private_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process(tmp_path, 10, 1, 100)
    (tmp_path / "10" / "statm").write_text("900 30 10 1 0 5 0")

    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "smaps_rollup":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert MemoryMeter(10, tmp_path).sample() == 20 * os.sysconf("SC_PAGE_SIZE")


HOLD = "data = bytearray(b'x' * 50_000_000); print('ready', flush=True); input()"


def test_the_memory_of_a_real_child_is_seen():
    meter = MemoryMeter()
    before = meter.sample()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert meter.sample() - before > 45_000_000
        child.communicate(b"\n")


def test_idle_share_stays_within_bounds():
    meter = WorkMeter()
    assert meter.idle_share(num_cells=2, elapsed_s=0.0) == 0.0
    meter.add(0, 100.0)
    assert meter.idle_share(num_cells=2, elapsed_s=10.0) == 0.0
    assert meter.idle_share(num_cells=2, elapsed_s=100.0) == pytest.approx(0.5)


def test_work_of_earlier_lives_counts():
    meter = WorkMeter(before_s=100.0)
    assert meter.idle_share(num_cells=2, elapsed_s=100.0) == pytest.approx(0.5)
    meter.observe(1, "engine", 50.0)
    assert meter.idle_share(num_cells=2, elapsed_s=100.0) == pytest.approx(0.25)
