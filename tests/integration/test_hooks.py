"""A whole run with every hook, by real processes: what they said is what was trained, and a restart asks none of them again."""

from __future__ import annotations

import pytest

from qwengyre.core.arrays import FLAG, unpack
from qwengyre.core.ids import group_of, index_of
from qwengyre.core.records import MicroStep, Validity
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, ExecutionDone, GroupJudged, TaskChosen
from tests.integration.run_kit import RunKit

pytestmark = pytest.mark.integration

RULES = '''
def reward(execution):
    """Letters of the answer, counted by this hook, and a third more than the task gave: so that the two cannot be mistaken."""
    answer = execution.workspace.read_text("answer")
    letters = sum(letter.isalpha() for letter in answer) / max(1, len(answer))
    assert abs(letters - execution.score) < 1e-9, (letters, execution.score)
    assert execution.transcript.calls[0].prompt.count(execution.instruction.strip()) == 1
    assert len(execution.transcript) == 2
    return execution.score + 1 / 3


def first_of_two(group):
    return group.group % 2 == 0


def ranks(group):
    order = sorted(range(len(group.executions)), key=lambda place: group.rewards[place])
    return [float(order.index(place)) - 1.5 for place in range(len(order))]


def only_one(paths):
    return [len(paths.candidates) - 1]


def in_turn(progress):
    """Task 2 of the folder, and one of a folder beside it."""
    assert sorted(progress.tasks) == ["train-0", "train-1", "train-2"]
    while True:
        yield "train-2"
        yield "more/beside"


class Heard:
    def __init__(self, folder):
        self.file = open(folder / "heard.txt", "a", buffering=1)

    def on_execution(self, execution):
        print("execution", execution.kind, execution.task, file=self.file)

    def on_step(self, step):
        print("step", step.step, file=self.file)

    def on_publish(self, published):
        print("publish", published.version, file=self.file)

    def on_evaluation(self, evaluation):
        print("evaluation", evaluation.version, file=self.file)

    def on_end(self, end):
        print("end", end.reason, file=self.file)
'''
LOSS = """
def plain(batch, config):
    return -batch.advantage_O * batch.logp_O
"""
HOOKS = """
[hooks]
reward = "my_rules:reward"
group_filter = "my_rules:first_of_two"
advantage = "my_rules:ranks"
choice = "my_rules:only_one"
token_loss = "my_loss:plain"
callbacks = ["my_rules:Heard"]
"""


def test_a_run_with_every_hook_trains_what_they_say(tmp_path):
    kit = RunKit(tmp_path, steps=2, turns=2, max_tokens=12)
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "my_loss.py").write_text(LOSS)
    kit.task(tmp_path / "more" / "beside")
    text = kit.run_file.read_text().replace("[tasks]", '[tasks]\nsource = "my_rules:in_turn"')
    kit.run_file.write_text(text + HOOKS)
    folder = kit.run()
    records = [record for _, record in read(folder.controller_journal, ControllerRecord)]
    judged = {record.group: record.judgement for record in records if isinstance(record, GroupJudged)}
    done = {record.execution: record for record in records if isinstance(record, ExecutionDone)}
    for one in done.values():
        assert one.outcome.validity is Validity.VALID
        if group_of(one.execution) in judged:
            assert one.outcome.score == pytest.approx(one.outcome.task_score + 1 / 3)
        else:  # of the evaluation
            assert one.outcome.task_score is None
    assert len(judged) >= 4
    for group, judgement in judged.items():
        assert sorted(judgement.advantages) == [-1.5, -0.5, 0.5, 1.5] if group % 2 == 0 else not any(judgement.advantages)
    trained = [execution for _, record in read(folder.trained_journal, MicroStep) for execution in record.executions]
    assert trained and {group_of(one.execution) % 2 for one in trained} == {0}
    for one in trained:
        assert one.advantage == judged[one.group].advantages[index_of(one.execution)]
        [path] = one.trajectories
        assert unpack(path.trainable_T, FLAG).any()
    assert {one.task for one in done.values() if group_of(one.execution) in judged} == {"train-2", "beside"}
    chosen = {record.group: record.task for record in records if isinstance(record, TaskChosen)}
    assert all(chosen[group] == done[f"e{group:06d}-0"].task for group in judged)
    heard = (folder.path / "heard.txt").read_text().splitlines()
    assert heard.count("execution train train-2") + heard.count("execution train beside") == 4 * len(judged)
    assert [line for line in heard if not line.startswith(("execution", "publish"))] == [
        "step 1",
        "step 2",
        "evaluation 2",
        "end finished",
    ]
    assert "publish 2" in heard
