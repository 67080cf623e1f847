from __future__ import annotations

import pytest

from qwengyre.core.errors import ProcessGaveUp, SandboxError
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.runtime.give_up import Losses, Patience


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


def test_a_process_that_is_lost_five_times_within_minutes_ends_the_run_with_its_last_words():
    losses = Losses()
    for now in (0.0, 400.0, 410.0, 420.0, 430.0):
        losses.see("cell-1", now)
    losses.see("gateway", 431.0)
    with pytest.raises(ProcessGaveUp, match=r"cell-1 was lost 5 times within 300 s; no such model"):
        losses.see("cell-1", 440.0, "no such model")
