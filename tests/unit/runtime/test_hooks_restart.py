"""What hooks said is in the journal before it is used, and a later life takes it from there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.hooks.load import Hook, HookRef
from qwengyre.hooks.loaded import LoadedHooks
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord, GroupJudged, RunOpened, TaskChosen
from qwengyre.runtime.recovery import recover
from qwengyre.runtime.sourcing import Sourcing
from qwengyre.sandbox.kinds import SandboxTable
from qwengyre.sandbox.task import Task, load_task
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.trajectory.process import Judgement

JUDGEMENT = Judgement((0.5, None, -0.5), ((1, 0), None, None))


def journal(path: Path) -> Journal:
    return Journal.open(path, ControllerRecord)


def test_judgements_and_tasks_are_recovered(tmp_path):
    with journal(tmp_path / "controller.log") as made:
        made.append(RunOpened(0, 0.0, "now"))
        made.append(TaskChosen(0, "a", "/a"))
        made.append(GroupJudged(0, JUDGEMENT))
    recovered = recover(tmp_path / "controller.log", SchedulerConfig())
    assert recovered.judged == {0: JUDGEMENT} and recovered.chosen == {0: TaskChosen(0, "a", "/a")}


def write_task(folder: Path) -> Task:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text('echo 1 > "$VERIFIER_DIR/reward.txt"\n')
    return load_task(folder)


class FakeJournal:
    def __init__(self) -> None:
        self.records: list[TaskChosen] = []

    def append(self, record: TaskChosen) -> None:
        self.records.append(record)


def sourcing(tmp_path: Path, asked: list[str], kept: FakeJournal, chosen: dict[int, TaskChosen]) -> tuple[Sourcing, dict]:
    def names(progress):
        for name in ("a", "beside", "a", "held", "a"):
            asked.append(name)
            yield name

    hook = Hook(HookRef("tasks.source", "rules:names", str(tmp_path)), names, "rules.py", 1)
    config = SimpleNamespace(
        runtime=SimpleNamespace(seed=0),
        hooks=SimpleNamespace(timeout_s=60.0),
        sandbox=SandboxTable(host_programs=True),
        harness=None,
    )
    tasks = {"a": Task("a", "/a", "do", 1.0, 1.0), "held": Task("held", "/held", "do", 1.0, 1.0)}
    return Sourcing(config, LoadedHooks(source=hook), tasks, ("held",), kept, chosen), tasks


async def test_a_source_is_asked_once_for_each_group_over_all_lives(tmp_path):
    write_task(tmp_path / "beside")
    asked, kept = [], FakeJournal()
    first, _ = sourcing(tmp_path, asked, kept, {})
    assert [await first.task_of(group) for group in (0, 1)] == ["a", "beside"]
    assert [(record.group, record.task) for record in kept.records] == [(0, "a"), (1, "beside")]
    chosen = {record.group: record for record in kept.records}
    asked.clear()
    second, tasks = sourcing(tmp_path, asked, kept, chosen)
    assert [await second.task_of(group) for group in (0, 1)] == ["a", "beside"]
    assert asked == [] and tasks["beside"].folder == str((tmp_path / "beside").resolve())  # loaded again, by where it was
    assert await second.task_of(2) == "a"
    assert asked == ["a", "beside", "a"] and len(kept.records) == 3


async def test_a_held_out_task_and_a_folder_that_is_gone_are_refused(tmp_path):
    write_task(tmp_path / "held")
    write_task(tmp_path / "beside")
    made, _ = sourcing(tmp_path, [], FakeJournal(), {0: TaskChosen(0, "gone", str(tmp_path / "gone"))})
    with pytest.raises(ConfigError, match="gone"):
        await made.task_of(0)
    with pytest.raises(Exception, match="held-out task, which is never trained on"):
        for group in (1, 2, 3):
            await made.task_of(group)
