"""Errors of a cell arrive as what they are: a cell that refuses is not a cell that failed."""

from __future__ import annotations

import pytest

from qwengyre.cell import api
from qwengyre.cell.cell import CellAddress
from qwengyre.core.errors import (
    CellFailed,
    ContextOverflow,
    MembershipBroken,
    NonFiniteLoss,
    PathTooLong,
    QwenGyreError,
    StaleRead,
)
from qwengyre.runtime.cell_client import CellClient

CLIENT = CellClient(CellAddress(3, 0, "http://127.0.0.1:1", "tcp://127.0.0.1:1", 1), "token")


@pytest.mark.parametrize("kind", [NonFiniteLoss, MembershipBroken, PathTooLong, ContextOverflow, StaleRead])
def test_errors_keep_their_type_whatever_their_constructor_takes(kind):
    error = CLIENT._refusal("Compute", api.Refused(kind.__name__, "loss is nan"))
    assert type(error) is kind
    assert str(error) == "cell 3: Compute: loss is nan"


def test_order_for_another_life_is_a_failure_of_the_cell():
    error = CLIENT._refusal("Reduce", api.Refused("CellFailed", "order for epoch 1"))
    assert isinstance(error, CellFailed)
    assert error.cell == 3


def test_unknown_error_is_no_failure_of_the_cell():
    error = CLIENT._refusal("Reduce", api.Refused("SomethingElse", "odd"))
    assert type(error) is QwenGyreError
