"""Steps that are done again after a loss count once; switches and joins are counted from the journal as they are live."""

from __future__ import annotations

import pytest

from qwengyre.runtime.step_history import StepHistory
from qwengyre.runtime.tally import Tally
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.telemetry.records import StepFinished


def finished(
    step: int, reward: float, *, at: float = 0.0, groups: int = 1, staleness: float = 0.0, clipped: float = 0.0
) -> StepFinished:
    values = dict.fromkeys(StepFinished.__struct_fields__, 0) | {
        "at": at,
        "step": step,
        "reward_mean": reward,
        "num_groups": groups,
        "staleness_mean": staleness,
        "staleness_max": round(staleness),
        "clip_fraction": clipped,
        "num_trajectories": 10 * groups,
    }
    return StepFinished(**values)


def test_a_step_that_is_done_again_counts_once_with_all_that_followed():
    history = StepHistory()
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        history.add(finished(step, reward, at=10.0 * reward, staleness=4.0 if reward == 0.3 else 1.0))
    assert history.rewards == (0.1, 0.25)
    assert history.ends_s == [1.0, 2.5]
    assert (history.staleness_mean, history.staleness_max) == (1.0, 1)


def test_means_weigh_steps_by_what_was_trained():
    history = StepHistory()
    history.add(finished(1, 0.0, groups=3, staleness=1.0, clipped=0.2))
    history.add(finished(2, 0.0, groups=1, staleness=3.0, clipped=0.6))
    assert history.staleness_mean == pytest.approx(1.5) and history.clip_fraction == pytest.approx(0.3)


def test_a_join_counts_only_in_the_middle_of_a_step():
    tally = Tally()
    join = ev.StepJoined(at=0.0, ticket=1, cell=1)
    tally.see(join, [], 0)
    tally.see(ev.CellInTraining(at=0.0, ticket=2, cell=1), [cmd.Compute(3, 0, 0, "m")], 0)
    tally.see(join, [], 0)
    tally.see(join, [cmd.OpenStep(4, 0)], 0)
    tally.see(join, [], 0)
    assert (tally.joins_mid_step, tally.joins[0]) == (2, 2)
    assert (tally.switches_to_training, tally.switches_to_rollout) == (1, 0)
