from __future__ import annotations

import msgspec
import pytest

from qwengyre.telemetry.learning import CAUSES, cause_of, note_of, note_of_all
from qwengyre.telemetry.records import StepFinished
from tests.unit.dashboard.synthetic import step

GOOD = msgspec.structs.replace(step(1, 9.0), num_mixed_groups=3, num_scored=40, num_calls=200, update_norm=0.1)


def at(number: int = 1, **changes: object) -> StepFinished:
    return msgspec.structs.replace(GOOD, step=number, **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_scored": 0, "num_dropped": 40, "num_mixed_groups": 0, "tokens_trained": 0}, "no execution of it could be scored"),
        ({"num_calls": 0, "tokens_trained": 0, "num_mixed_groups": 0, "reward_mean": 0.0}, "no harness called the model"),
        ({"num_mixed_groups": 0, "reward_mean": 0.0, "reward_std": 0.0, "tokens_trained": 0}, "every execution scored 0"),
        ({"num_mixed_groups": 0, "reward_mean": 1.0, "reward_std": 0.0, "tokens_trained": 0}, "every execution scored the same"),
        ({"num_mixed_groups": 0, "tokens_trained": 0}, "in every group all executions scored the same"),
        ({"num_mixed_groups": 0}, "in every group all executions scored the same"),
        ({"tokens_trained": 0}, "none of their tokens can be trained"),
        ({"clip_fraction": 1.0}, "the objective clipped every trajectory"),
        ({"update_norm": 0.0}, "its update was not applied"),
    ],
)
def test_a_step_that_taught_nothing_says_why_and_what_to_look_at(changes: dict, what: str):
    note = note_of(at(7, **changes))
    assert note.startswith("step 7 taught the policy nothing: ") and what in note and ". Look at " in note
    assert note_of_all([at(1, **changes), at(2, **changes)]).startswith(f"no step taught the policy anything: {note[34:60]}")


def test_a_step_that_taught_something_or_that_an_old_version_recorded_says_nothing():
    assert cause_of(GOOD) is None and note_of(GOOD) == "" and note_of_all([GOOD]) == ""
    assert cause_of(at(num_mixed_groups=None, tokens_trained=0, update_norm=None)) is None
    assert cause_of(at(update_norm=None)) is None


def test_of_a_run_each_cause_is_told_once_with_how_often():
    all_zero = {"num_mixed_groups": 0, "reward_mean": 0.0, "reward_std": 0.0, "tokens_trained": 0}
    steps = [at(1, **all_zero), at(2, **all_zero), GOOD, at(4, clip_fraction=1.0)]
    note = note_of_all(steps)
    assert note.startswith("3 of 4 steps taught the policy nothing: every execution scored 0 (2 of them). Look at ")
    assert note.count("every execution scored 0") == 1 and "clipped every trajectory (1 of them)" in note


def test_every_cause_can_be_met():
    """A cause behind one that always holds before it would never be told."""
    assert len({cause.what for cause in CAUSES}) == len(CAUSES) == 8
