"""A quickstart whose agent attacks all that it can reach before it works: it ends, with the rewards that its work earns."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwengyre.journal.reader import read
from qwengyre.runtime.records import ControllerRecord, ExecutionDone
from qwengyre.sandbox.tree import Kind, remove_tree, walk

ROOT = Path(__file__).parents[1]
WATCHED = [os.path.realpath(sys.executable), "/usr/bin/env", "/dev/null", "/dev/full", "/dev/urandom"]
STEPS = 2
SMALL = {
    "scheduler.steps": STEPS, "tasks.num_train": 8, "tasks.num_held_out": 2, "scheduler.groups_per_step": 2,
    "scheduler.executions_per_group": 4, "evaluation.samples": 1,
}  # fmt: skip


def hostile_recipe(folder: Path) -> Path:
    """The quickstart, started cold by the hostile agent; nothing else is changed but its length."""
    text = (ROOT / "recipes/quickstart.toml").read_text()
    agent = ROOT / "checks/hostile_agent.py"
    for old, new in {
        '"python3", "-m", "qwengyre_harness",': f'"python3", "{agent}",',
        "warm_start = true": f'warm_start = false\nreadable = ["{agent}", "{ROOT / "qwengyre_harness"}"]',
        "timeout_s = 30": "timeout_s = 300",
    }.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "hostile.toml"
    path.write_text(text)
    return path


def with_power(folder: Path) -> list[str]:
    """Names below it that are more than their user's. Kept workspaces are as deep as the agent made them, deeper than a path may be long."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        modes = [
            (name, os.lstat(name, dir_fd=parent).st_mode) for kind, parent, name in walk(root, forced=False) if kind is Kind.ENTRY
        ]
        return [name for name, mode in modes if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & 0o7077]
    finally:
        os.close(root)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Removed by what knows folders as deep as the agent makes them: pytest's own removal fails on them, in every run that comes later."""
    yield tmp_path
    remove_tree(tmp_path)


@pytest.mark.timeout(3600)
def test_a_hostile_agent_earns_what_its_work_earns(folder):
    before = {path: os.stat(path).st_mode for path in WATCHED}
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    command = [str(Path(sys.executable).with_name("qwengyre")), "train", str(hostile_recipe(folder)), *settings]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    records = [record for _, record in read(run / "journal/controller.log", ControllerRecord)]
    outcomes = [record.outcome for record in records if isinstance(record, ExecutionDone)]
    assert outcomes and {(one.end.value, one.validity.value) for one in outcomes} == {("exited", "valid")}
    assert {path: os.stat(path).st_mode for path in WATCHED} == before
    assert with_power(run) == []
