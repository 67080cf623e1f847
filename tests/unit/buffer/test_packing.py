"""Micro-steps: what is merged, what is cut, and that nothing is lost or computed twice without need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.buffer.packing import num_distinct_tokens, pack_group, split_execution
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.testing.call_records import call_records, tree_of
from qwengyre.testing.random_calls import random_execution
from qwengyre.trainer import rows
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.process import FinishedExecution, process_group
from qwengyre.trajectory.tree import TrajectoryTree

PROMPT = list(range(100, 200))
BUDGET = 1 << 20
KEEP_ALL = TrainerConfig(kl_coefficient=1.0)
"""Nothing is left out of a row for its advantage."""


def group_of(trees: list[TrajectoryTree], **config):
    finished = [
        FinishedExecution(f"e000003-{index}", tree, Outcome(End.EXITED, Validity.VALID, float(index), "", 1.0))
        for index, tree in enumerate(trees)
    ]
    return process_group(3, finished, TrajectoryConfig(j_max=0, keep_zero_advantage=True, **config), seed=0)


def answers(execution: int, lengths: list[int], prompt: list[int] = PROMPT) -> TrajectoryTree:
    """One shared prompt, then a branch for every length."""
    name = f"e000003-{execution}"
    calls = [call_records(0, prompt, [execution] * lengths[0])]
    for index, length in enumerate(lengths[1:], start=1):
        calls.append(call_records(index, [50 + index], [1] * length, base=0, base_tokens=len(prompt), at=index))
    return tree_of(*calls, execution=name)


def test_executions_are_merged_up_to_the_target_and_the_shared_prompt_counts_once():
    executions = group_of([answers(index, [20]) for index in range(4)])
    steps = pack_group(executions, step=5, config=TrajectoryConfig(micro_step_tokens=140), max_tokens=BUDGET)
    assert [[part.execution for part in step.executions] for step in steps] == [
        ["e000003-0", "e000003-1"],
        ["e000003-2", "e000003-3"],
    ]
    assert [step.num_distinct_tokens for step in steps] == [140, 140]
    assert [step.micro_step for step in steps] == ["s000005-g000003-m0", "s000005-g000003-m1"]


def test_target_zero_never_merges():
    executions = group_of([answers(index, [20]) for index in range(3)])
    assert len(pack_group(executions, step=0, config=TrajectoryConfig(micro_step_tokens=0), max_tokens=BUDGET)) == 3


def test_executions_that_share_too_little_stay_apart():
    executions = group_of([answers(0, [20]), answers(1, [20], prompt=[*range(10), *range(300, 390)])])
    merged = TrajectoryConfig(micro_step_tokens=1000)
    apart = TrajectoryConfig(micro_step_tokens=1000, merge_min_shared_share=0.1)
    assert [len(pack_group(executions, step=0, config=config, max_tokens=BUDGET)) for config in (merged, apart)] == [1, 2]


def test_equal_answers_of_two_executions_do_not_count_as_shared():
    executions = group_of([answers(7, [20]), answers(7, [20])])
    (step,) = pack_group(executions, step=0, config=TrajectoryConfig(micro_step_tokens=1000), max_tokens=BUDGET)
    assert step.num_distinct_tokens == 100 + 20 + 20


def test_tree_over_the_budget_is_cut_between_paths_and_keeps_its_token_count():
    (execution,) = group_of([answers(0, [30, 30, 30, 30])])
    parts = split_execution(execution, 170)
    assert [len(part.trajectories) for part in parts] == [2, 2]
    assert {part.num_trainable for part in parts} == {120}
    assert [num_distinct_tokens(part.trajectories) for part in parts] == [161, 162]


def test_path_over_the_budget_is_a_micro_step_of_its_own():
    (execution,) = group_of([answers(0, [30, 300])])
    steps = pack_group([execution], step=0, config=TrajectoryConfig(micro_step_tokens=0), max_tokens=150)
    assert sorted(step.num_distinct_tokens for step in steps) == [130, 401]


def test_nothing_to_compute_is_in_no_micro_step():
    executions = group_of([tree_of()])
    assert len(executions) == 1
    assert pack_group(executions, step=0, config=TrajectoryConfig(), max_tokens=BUDGET) == []


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 60), st.integers(0, 60))
def test_every_trajectory_is_packed_once_and_budgets_hold(seed, num_executions, budget, target):
    rng = np.random.default_rng(seed)
    trees = [
        tree_of(*(call.records for call in random_execution(rng, 8, execution=name)), execution=name)
        for name in (f"e000003-{index}" for index in range(num_executions))
    ]
    executions = group_of(trees)
    steps = pack_group(executions, step=0, config=TrajectoryConfig(micro_step_tokens=target), max_tokens=budget)
    packed = [(part.execution, chosen.segments) for step in steps for part in step.executions for chosen in part.trajectories]
    wanted = [(whole.execution, chosen.segments) for whole in executions for chosen in whole.trajectories]
    assert sorted(packed, key=repr) == sorted(wanted, key=repr)
    assert len({step.micro_step for step in steps}) == len(steps)
    for step in steps:
        num_paths = sum(len(part.trajectories) for part in step.executions)
        row = rows.build(step, KEEP_ALL)
        assert row.row.num_rows <= budget or num_paths == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"j_max": -1}, "j_max"),
        ({"micro_step_tokens": -1}, "must not be negative"),
        ({"merge_min_shared_share": 2.0}, "between 0 and 1"),
    ],
)
def test_settings_that_contradict_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrajectoryConfig(**wrong)
