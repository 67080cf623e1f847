"""What is kept of ended executions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox import kept
from qwengyre.sandbox.config import HarnessConfig, LimitsConfig
from qwengyre.sandbox.harness import HarnessFiles
from qwengyre.sandbox.kept import SAMPLES_PER_REWARD, Keeper
from qwengyre.sandbox.spaces import FolderSpace
from qwengyre.sandbox.task import Task

TASK = Task("t", "/t", "do", 1.0, 1.0)


class Runs:
    """Ends executions one after the other; the clock stands unless `later` moves it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object):
        self.folder, self.now, self.number = folder, 0.0, 0
        monkeypatch.setattr(kept.time, "monotonic", lambda: self.now)
        self.keeper = Keeper(HarnessConfig(command=("x",), **settings), folder / "kept", folder / "kept")

    def end(self, score: float, end: End = End.EXITED, num_bytes: int = 10) -> str:
        self.now += 0.001
        name = f"e{self.number:06d}-0.0"
        self.number += 1
        workspace = self.folder / "work" / name / "workspace"
        workspace.mkdir(parents=True)
        (workspace / "file").write_bytes(b"x" * num_bytes)
        (workspace.parent / "harness.log").write_text("said")
        validity = Validity.DROPPED if end is End.LOST else Validity.VALID
        files = HarnessFiles(workspace.parent, FolderSpace(workspace.parent, LimitsConfig()))
        self.keeper.put_away(files, Outcome(end, validity, score, "", 1.0), TASK)
        return name

    @property
    def names(self) -> set[str]:
        return {path.name for path in (self.folder / "kept").glob("*")}


def test_a_harness_that_ends_well_and_earns_nothing_can_be_looked_at(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch)
    place = tmp_path / "kept" / runs.end(0.0)
    assert (place / "harness.log").read_text() == "said" and (place / "workspace/file").exists()
    said = json.loads((place / "outcome.json").read_bytes())
    assert (said["task"], said["score"], said["end"]) == ("t", 0.0, "exited")


def test_the_newest_of_each_kind_of_reward_are_kept(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch)
    ended = {score: [] for score in (0.0, 0.3, 1.0)}
    for _ in range(3 * SAMPLES_PER_REWARD):
        for score, names in ended.items():
            names.append(runs.end(score))
        runs.now += kept.SAMPLE_PERIOD_S
    assert runs.names == {name for names in ended.values() for name in names[-SAMPLES_PER_REWARD:]}


def test_a_full_sample_is_not_renewed_for_every_execution(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch)
    names = [runs.end(0.5) for _ in range(100)]
    assert runs.names == set(names[:SAMPLES_PER_REWARD])


def test_the_sample_is_bounded_in_size_and_the_oldest_make_room(tmp_path, monkeypatch):
    runs = Runs(tmp_path, monkeypatch, keep_sample_mb=2)
    names = [runs.end(score, num_bytes=700_000) for score in (0.0, 0.5, 1.0)]
    assert runs.names == set(names[1:])
    runs.end(0.0, num_bytes=3 * 2**20)
    assert runs.names == set(names[1:]), "one that is larger than the sample takes no other's place"


@pytest.mark.parametrize(("keep", "num"), [("failed", 0), ("all", 20), ("sample", SAMPLES_PER_REWARD)])
def test_what_is_kept_is_for_the_user_to_say(tmp_path, monkeypatch, keep, num):
    runs = Runs(tmp_path, monkeypatch, keep=keep, keep_failed=2)
    for _ in range(20):
        runs.end(0.0)
    assert len(runs.names) == num
    failed = [runs.end(1.0, End.CRASHED) for _ in range(3)]
    assert set(failed[:2]) <= runs.names
    assert runs.end(0.0, End.LOST) not in runs.names, "it is dispatched again"
