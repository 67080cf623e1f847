"""Advantages are relative to the executions of the group, and the two-level mean does not see how they branched or were cut."""

from __future__ import annotations

import numpy as np
import pytest

from qwengyre.buffer.packing import pack_group
from qwengyre.core.arrays import FLAG, unpack
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.testing.call_records import call_records, tree_of
from qwengyre.trajectory.advantages import group_advantages
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.process import FinishedExecution, process_group
from qwengyre.trajectory.tree import TrajectoryTree


def outcome(score: float, validity: Validity = Validity.VALID) -> Outcome:
    return Outcome(End.EXITED, validity, score, "digest", 1.0)


def branching(execution: str, rows: list[int]) -> TrajectoryTree:
    """An execution of one prompt with `rows` branches of so many trainable tokens each."""
    calls = [call_records(0, [1], [2] * rows[0])]
    for index, length in enumerate(rows[1:], start=1):
        calls.append(call_records(index, [2 + index], [1] * length, base=0, base_tokens=1, at=index))
    return tree_of(*calls, execution=execution)


def group_of(rows: list[list[int]], scores: list[float], **config):
    finished = [
        FinishedExecution(f"e000000-{index}", branching(f"e000000-{index}", lengths), outcome(score))
        for index, (lengths, score) in enumerate(zip(rows, scores, strict=True))
    ]
    return process_group(0, finished, TrajectoryConfig(**config), seed=1)


class TestGroupAdvantages:
    def test_reward_minus_mean(self):
        assert group_advantages([outcome(1.0), outcome(0.5), outcome(0.0)]) == [0.5, 0.0, -0.5]

    def test_dropped_leave_the_baseline_and_placeholders_stay(self):
        outcomes = [outcome(1.0), outcome(0.0, Validity.DROPPED), outcome(0.0, Validity.PLACEHOLDER)]
        assert group_advantages(outcomes) == [0.5, None, -0.5]

    def test_equal_rewards_give_exactly_zero(self):
        assert group_advantages([outcome(0.1)] * 3) == [0.0, 0.0, 0.0]

    def test_fewer_than_two_give_zero(self):
        assert group_advantages([outcome(1.0), outcome(1.0, Validity.DROPPED)]) == [0.0, None]

    def test_division_by_the_population_standard_deviation(self):
        assert group_advantages([outcome(1.0), outcome(0.0)], divide_by_std=True) == [1.0, -1.0]


@pytest.mark.parametrize("rows", [[4, 3, 4], [1, 1, 1], [9, 1, 5]])
def test_mean_advantage_is_zero_over_executions_however_many_rows_each_has(rows):
    executions = group_of([[5] * num_rows for num_rows in rows], [1.0, 0.25, 0.0], j_max=0)
    assert [len(execution.trajectories) for execution in executions] == rows
    assert sum(execution.advantage for execution in executions) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("budget", [45, 100, 151, 10_000])
def test_executions_weigh_a_third_each_however_their_tokens_are_cut(budget):
    executions = group_of([[50, 100], [30, 30, 30], [40]], [1.0, 0.5, 0.2], micro_step_tokens=0)
    config = TrajectoryConfig(micro_step_tokens=0)
    weight: dict[str, float] = {}
    for micro_step in pack_group(executions, step=0, config=config, max_tokens=budget):
        for part in micro_step.executions:
            trained = sum(int(unpack(chosen.trainable_T, FLAG).sum()) for chosen in part.trajectories)
            weight[part.execution] = weight.get(part.execution, 0.0) + trained / part.num_trainable / len(executions)
    assert [execution.num_trainable for execution in executions] == [150, 90, 40]
    assert list(weight.values()) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("rows", [[100, 900], [100, 300, 300, 300], [100] + [90] * 10])
@pytest.mark.parametrize("budget", [950, 1001, 5000])
def test_token_mean_of_an_execution_is_the_same_in_any_cut(rows, budget):
    executions = group_of([rows, [1]], [1.0, 0.0], j_max=0)
    config = TrajectoryConfig(micro_step_tokens=0)
    total = 0.0
    for micro_step in pack_group(executions, step=0, config=config, max_tokens=budget):
        for part in micro_step.executions:
            if part.execution == "e000000-0":
                for chosen in part.trajectories:
                    trained = int(unpack(chosen.trainable_T, FLAG).sum())
                    total += trained * (2.0 if trained == 100 else 0.5) / part.num_trainable
    assert total == pytest.approx(0.65)


class TestProcessGroup:
    def test_equal_rewards_leave_nothing_to_compute_but_count(self):
        executions = group_of([[5], [5]], [0.4, 0.4])
        assert [(execution.advantage, execution.trajectories) for execution in executions] == [(0.0, ()), (0.0, ())]

    def test_zero_advantage_is_kept_where_a_kl_term_needs_it(self):
        executions = group_of([[5], [5]], [0.4, 0.4], keep_zero_advantage=True)
        assert [execution.num_trainable for execution in executions] == [5, 5]

    def test_dropped_are_left_out_and_placeholders_stand_without_trajectories(self):
        finished = [
            FinishedExecution("e000000-0", branching("e000000-0", [3]), outcome(1.0)),
            FinishedExecution("e000000-1", branching("e000000-1", [3]), outcome(0.0, Validity.DROPPED)),
            FinishedExecution("e000000-2", tree_of(execution="e000000-2"), outcome(0.0, Validity.PLACEHOLDER)),
        ]
        executions = process_group(0, finished, TrajectoryConfig(), seed=1)
        assert [(execution.execution, execution.advantage, execution.num_trainable) for execution in executions] == [
            ("e000000-0", 0.5, 3),
            ("e000000-2", -0.5, 0),
        ]

    def test_choice_depends_on_seed_and_execution_only(self):
        rows = [[5] * 9, [5] * 9]
        first, again = group_of(rows, [1.0, 0.0], j_max=2), group_of(rows, [1.0, 0.0], j_max=2)
        assert first == again
        one = FinishedExecution("e000000-1", branching("e000000-1", rows[1]), outcome(0.0))
        other = FinishedExecution("e000000-7", branching("e000000-7", [3]), outcome(1.0))
        alone = process_group(0, [other, one], TrajectoryConfig(j_max=2), seed=1)
        assert alone[1].trajectories == first[1].trajectories

    @pytest.mark.parametrize(("temperature", "trained_at"), [(0.7, 0.7), (0.0, 1.0)])
    def test_temperature_is_that_of_the_attempt_or_1_when_nothing_is_trained(self, temperature, trained_at):
        tree = tree_of(call_records(0, [1], [2]), temperature=temperature)
        finished = [FinishedExecution("e", tree, outcome(score)) for score in (1.0, 0.0)]
        assert [part.temperature for part in process_group(0, finished, TrajectoryConfig(), seed=0)] == [trained_at] * 2


def test_recorded_log_probs_and_masks_line_up():
    (execution, _) = group_of([[2, 3], [1]], [1.0, 0.0])
    for chosen in execution.trajectories:
        trained = unpack(chosen.trainable_T, FLAG)
        logprob = unpack(chosen.logprob_T, np.dtype("<f4"))
        assert (logprob[trained] < 0).all()
        assert not logprob[0]
