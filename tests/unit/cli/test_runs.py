"""`qwengyre runs`: what is listed, what may go, and what stays whatever is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwengyre.bench.made_up_run import MadeUpRun, write_made_up_run
from qwengyre.cli.main import application
from qwengyre.cli.runs import size_of
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord
from qwengyre.telemetry.folder import RunFolder, snapshot_file


def call(*words: str) -> Any:
    return CliRunner().invoke(application(["runs"]), ["runs", *words])


@pytest.fixture
def two(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """An old and a new one, each with two snapshots and two checkpoints."""
    found = []
    for age, name in ((10, "old"), (0, "new")):
        write_made_up_run(tmp_path, MadeUpRun(num_executions=96, num_tasks=6, seed=0, name=name))
        [path] = (path for path in tmp_path.iterdir() if path.name not in {one.path.name for one in found})
        folder = RunFolder(path)
        for step in (1, 2):
            snapshot_file(folder.snapshots, step).parent.mkdir(exist_ok=True)
            snapshot_file(folder.snapshots, step).write_bytes(b"w" * 5000)
            (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)
            (folder.checkpoints / f"step-{step:06d}" / "model.safetensors").write_bytes(b"w" * 5000)
        for file in (folder.metrics, folder.config):
            when = file.stat().st_mtime - age * 86_400
            os.utime(file, (when, when))
        found.append(folder)
    return found[0], found[1]


def test_all_are_listed_the_newest_first(two: tuple[RunFolder, RunFolder], tmp_path: Path):
    rows = json.loads(call(str(tmp_path), "--json", "-").output)
    assert [row["name"] for row in rows] == [folder.path.name for folder in reversed(two)]
    assert all(row["state"] == "finished" and row["steps"] > 0 and row["size_bytes"] > 20_000 for row in rows)
    assert rows[1]["age_s"] > 9 * 86_400 > rows[0]["age_s"]
    listed = call(str(tmp_path)).output.splitlines()
    assert len(listed) == 3 and listed[1].startswith(two[1].path.name)


def test_nothing_goes_without_a_yes(two: tuple[RunFolder, RunFolder], tmp_path: Path):
    result = call(str(tmp_path), "--prune", "--keep", "0")
    assert "would go" in result.output and all(folder.path.exists() for folder in two)


def test_the_newest_and_the_young_stay(two: tuple[RunFolder, RunFolder], tmp_path: Path):
    assert "would go" not in call(str(tmp_path), "--prune", "--keep", "2").output
    assert "would go" not in call(str(tmp_path), "--prune", "--keep", "0", "--older-than", "11").output
    call(str(tmp_path), "--prune", "--keep", "0", "--older-than", "9", "--yes")
    assert [folder.path.exists() for folder in two] == [False, True]


def test_of_weights_the_last_checkpoint_stays(two: tuple[RunFolder, RunFolder], tmp_path: Path):
    call(str(tmp_path), "--prune", "--keep", "1", "--weights-only", "--yes")
    old, new = two
    assert not old.snapshot_files() and [path.name for path in old.checkpoints.glob("step-*")] == ["step-000002"]
    assert old.controller_journal.exists() and len(new.snapshot_files()) == 2


def test_a_run_that_goes_on_stays(two: tuple[RunFolder, RunFolder], tmp_path: Path):
    held = Journal.open(two[0].controller_journal, ControllerRecord)
    try:
        result = call(str(tmp_path), "--prune", "--keep", "0", "--yes")
    finally:
        held.close()
    assert "is running" in result.output and [folder.path.exists() for folder in two] == [True, False]


def test_a_folder_that_is_not_a_run_stays(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    assert "no runs" in call(str(tmp_path)).output
    call(str(tmp_path), "--prune", "--keep", "0", "--yes")
    assert (tmp_path / "notes" / "mine.txt").exists()


def test_bytes_under_two_names_count_once(tmp_path: Path):
    (tmp_path / "one").write_bytes(b"x" * 100_000)
    alone = size_of([tmp_path])
    os.link(tmp_path / "one", tmp_path / "other")
    assert size_of([tmp_path]) == alone >= 100_000
