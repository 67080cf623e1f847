from __future__ import annotations

import pytest

from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.runtime.give_up import Patience


def outcome(end: End, detail: str = "") -> Outcome:
    validity = Validity.VALID if end is End.EXITED else Validity.DROPPED
    return Outcome(end, validity, 0.0, "", 1.0, detail=detail)


def test_the_same_mistake_in_a_row_ends_the_run_with_the_last_ones_story():
    patience = Patience(3)
    patience.see(outcome(End.NEVER_CALLED))
    patience.see(outcome(End.SETUP_FAILED))
    with pytest.raises(SandboxError, match=r"last 3 executions .*evaluator_failed.*tests/test\.sh(.|\n)*test.sh: line 1: oops"):
        patience.see(outcome(End.EVALUATOR_FAILED, "test.sh: line 1: oops"))


def test_one_execution_that_works_starts_the_count_anew():
    patience = Patience(2)
    for _ in range(3):
        patience.see(outcome(End.NEVER_CALLED))
        patience.see(outcome(End.EXITED))


def test_timeouts_and_crashes_of_a_harness_are_data():
    patience = Patience(1)
    for end in (End.HARNESS_TIMEOUT, End.OVERALL_TIMEOUT, End.CRASHED):
        patience.see(outcome(end))


def test_0_never_gives_up():
    patience = Patience(0)
    for _ in range(100):
        patience.see(outcome(End.NEVER_CALLED))
