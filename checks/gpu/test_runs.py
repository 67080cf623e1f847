"""Whole runs with engines and trainers on the device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from checks.gpu.conftest import Note
from qwengyre.telemetry.summary import read_summary
from tests.integration.run_kit import RunKit, executions_done, summary

ROOT = Path(__file__).parents[2]


def test_a_tiny_run_of_three_cells_that_serve_snapshots_on_ends_with_nothing_lost(
    device: torch.device, tmp_path: Path, note: Note
):
    """The core sends each snapshot once: every other reader has it from a cell that has read it."""
    kit = RunKit(tmp_path, steps=2)
    keys = (f"trainer.device={device.type}", f"engine.device={device.type}", "transfer.transport=tcp", "transfer.fanout=1")
    folder = kit.run(*(part for key in keys for part in ("--set", key)))
    found = summary(folder)
    note(executions=len(executions_done(folder)), max_logprob_gap=found.max_logprob_gap, calls_moved=found.calls_moved)
    assert found.steps == 2 and found.executions_lost == 0
    assert found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4


def test_the_quickstart_learns_on_the_device(device: torch.device, tmp_path: Path, note: Note):
    if device.type == "cpu":
        pytest.skip("on a processor it is `make quickstart`")
    keys = [f"trainer.device={device.type}", f"engine.device={device.type}"]
    keys += [] if shutil.which("bwrap") else ["harness.isolation=none"]
    command = [sys.executable, "-c", "from qwengyre.cli.main import main; main()", "train", "recipes/quickstart.toml"]
    command += ["--runs-dir", str(tmp_path / "runs"), *(part for key in keys for part in ("--set", key))]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, check=False)
    assert done.returncode == 0
    [run] = (tmp_path / "runs").iterdir()
    found = read_summary(run / "summary.json")
    assert found is not None
    figures = msgspec.structs.asdict(found)
    note(**{name: value for name, value in figures.items() if isinstance(value, (int, float))})
    assert found.executions_lost == 0 and found.score_after > found.score_before + 0.2
    assert found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4
