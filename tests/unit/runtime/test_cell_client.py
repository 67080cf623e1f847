"""Errors of a cell arrive as what they are: a cell that refuses is not a cell that failed."""

from __future__ import annotations

import pytest

from qwengyre.cell.cell import CellAddress
from qwengyre.core.errors import CellFailed, MembershipBroken, NonFiniteLoss, QwenGyreError, StaleRead
from qwengyre.rpc.refusal import Refused, describe
from qwengyre.runtime.cell_client import CellClient

CLIENT = CellClient(CellAddress(3, 0, "http://127.0.0.1:1", "tcp://127.0.0.1:1", 1), "token")


REFUSED = [
    NonFiniteLoss("tiny", execution="e000001-0", path=2, what="loss is nan"),
    MembershipBroken(rank=1, epoch=3, num_members=2, reason="late"),
    StaleRead("released"),
]


@pytest.mark.parametrize("error", REFUSED, ids=lambda error: type(error).__name__)
def test_errors_keep_their_type_and_fields_and_say_who_had_them(error):
    arrived = CLIENT._refusal("Compute", describe(error))
    assert type(arrived) is type(error) and vars(arrived) == vars(error)
    assert str(arrived) == f"cell 3: Compute: {error}"


def test_a_request_for_another_incarnation_is_a_failure_of_the_cell():
    error = CLIENT._refusal("Reduce", describe(CellFailed(3, "order for epoch 1")))
    assert isinstance(error, CellFailed)
    assert (error.cell, error.reason) == (3, "order for epoch 1")


def test_an_error_that_this_side_does_not_have_is_not_a_failure_of_the_cell():
    error = CLIENT._refusal("Reduce", Refused("SomethingElse", "odd"))
    assert type(error) is QwenGyreError
