"""The reference harness's tools on a real folder."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from qwengyre_harness.tools import Folder

TIMEOUT_S = 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, change_command="", command_timeout_s=TIMEOUT_S, max_output_chars=200)


def test_written_files_can_be_read_and_seen_by_commands(folder: Folder):
    assert folder.call("write_file", {"path": "a/b.txt", "content": "hello\n"}) == "wrote a/b.txt"
    assert folder.call("read_file", {"path": "a/b.txt"}) == "hello\n"
    assert folder.call("run", {"command": "cat a/b.txt"}) == "hello"


def test_the_change_command_answers_a_write(tmp_path: Path):
    folder = Folder(tmp_path, "echo checked; cat a.txt", TIMEOUT_S, 200)
    assert folder.call("write_file", {"path": "a.txt", "content": "text"}) == "checked\ntext"


@pytest.mark.parametrize("path", ["../out.txt", "/etc/hostname"])
def test_paths_out_of_the_workspace_are_refused(folder: Folder, path: str):
    assert "outside the workspace" in folder.call("read_file", {"path": path})
    assert "outside the workspace" in folder.call("write_file", {"path": path, "content": ""})


def test_failures_are_results(folder: Folder):
    assert folder.call("run", {"command": "echo no; exit 3"}) == "no\nexit code 3"
    assert folder.call("read_file", {"path": "missing"}).startswith("error: ")
    assert folder.call("write_file", {"path": "x"}) == "error: wrong arguments for write_file: path"
    with pytest.raises(KeyError):
        folder.call("format_disk", {})


def test_a_command_that_runs_too_long_is_killed_with_its_children(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """An hour has passed once the command has begun, and what it says then makes the reader look at its watch."""
    clock, readings = subprocess._time, itertools.count()
    monkeypatch.setattr(
        subprocess, "_time", lambda: clock() + (TIMEOUT_S + 1) * (next(readings) > 0 and (folder.root / "begun").exists())
    )
    output = folder.call("run", {"command": "echo said; touch begun; echo more; sleep 1000 & sleep 1000"})
    assert output.startswith("said\n") and output.endswith("\nerror: stopped after 3600 s")


def test_the_middle_of_long_output_is_left_out(folder: Folder):
    output = folder.call("run", {"command": "python3 -c 'print(\"x\" * 1000)'"})
    assert "800 characters left out" in output and len(output) < 300
