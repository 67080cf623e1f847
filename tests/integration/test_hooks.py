"""A whole run with every hook, by real processes: what they said is what was trained, and a restart asks none of them again."""

from __future__ import annotations

import pytest

from qwengyre.core.arrays import FLAG, unpack
from qwengyre.core.ids import group_of, index_of
from qwengyre.core.records import MicroStep, Validity
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, ExecutionDone, GroupJudged
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
"""


def test_a_run_with_every_hook_trains_what_they_say(tmp_path):
    kit = RunKit(tmp_path, steps=2, turns=2, max_tokens=12)
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "my_loss.py").write_text(LOSS)
    with open(kit.run_file, "a") as file:
        file.write(HOOKS)
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
