"""Experts of tokens: told by whichever call computed a token first, found along every path that has it."""

from __future__ import annotations

import numpy as np
import pytest

from qwengyre.core.errors import CallOutOfOrder, InvariantViolated
from qwengyre.testing.call_records import call_records, opened, tree_of
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.layout import NO_ROUTE
from qwengyre.trajectory.records import CallRecord, TokensRouted


def told(records: list[CallRecord], first: int, routes: list[int], width: int = 2) -> list[CallRecord]:
    """The call with routes of tokens `first` and on, each of `width` equal bytes, in two records."""
    middle = len(routes) // 2
    parts = [(at, part) for at, part in ((first, routes[:middle]), (first + middle, routes[middle:])) if part]
    found = [TokensRouted(0, records[0].call, at, len(part), np.repeat(np.uint8(part), width).tobytes()) for at, part in parts]
    return [*records[:-1], *found, records[-1]]


def first_bytes(tree, call: str) -> list[int]:
    return np.frombuffer(tree.routes_T(tree.path_of(call)), np.uint8)[::2].tolist()


def test_a_later_call_tells_of_the_tokens_that_the_first_left_out():
    """The first computes all but its last token; the second finds its prefix in the cache and begins with that one."""
    one = told(call_records(0, [1, 2, 3], [10, 11], chunk=1), 0, [50, 51, 52, 53])
    two = told(call_records(1, [4, 5], [12, 13], base=0, base_tokens=5), 4, [54, 55, 56, 57])
    tree = tree_of(one, two)
    [first, second] = tree.calls
    assert first_bytes(tree, second) == [50, 51, 52, 53, 54, 55, 56, 57, NO_ROUTE]
    assert first_bytes(tree, first) == [50, 51, 52, 53, 54]


def test_a_token_that_was_computed_again_keeps_what_was_told_first_and_branches_have_their_own():
    one = told(call_records(0, [1, 2, 3], [10]), 0, [50, 51, 52])
    two = told(call_records(1, [1, 2, 9], [11]), 0, [60, 61, 62])
    tree = tree_of(one, two)
    [first, second] = tree.calls
    assert first_bytes(tree, first) == [50, 51, 52, NO_ROUTE]
    assert first_bytes(tree, second) == [50, 51, 62, NO_ROUTE]


def test_a_call_without_routes_has_none():
    tree = tree_of(call_records(0, [1, 2], [3]))
    assert tree.routes_T(tree.path_of(next(iter(tree.calls)))) == b""


def test_the_records_of_a_call_keep_its_routes():
    """Also of a call that moved, and was computed from another token on."""
    records = told(call_records(0, [1, 2, 3], [10, 11, 12], chunk=1), 0, [50, 51, 52, 53, 54])
    moved = TokensRouted(0, 0, 2, 1, bytes([9, 9]))
    log = CallLog.of(opened(), [*records[:-1], moved, records[-1]])
    [call] = log
    assert [(run.start, run.num_tokens, bytes(run.routes[::2])) for run in call.routed] == [
        (0, 5, bytes([50, 51, 52, 53, 54])),
        (2, 1, bytes([9])),
    ]
    [again] = CallLog.of(opened(), call.records())
    assert again.routed == call.routed and list(again.sampled_S) == list(call.sampled_S)


def test_routes_that_contradict_themselves_are_refused():
    with pytest.raises(CallOutOfOrder, match="3 bytes of routes for 2 tokens"):
        CallLog.of(opened(), [call_records(0, [1], [2])[0], TokensRouted(0, 0, 0, 2, b"abc")])
    one, two = told(call_records(0, [1, 2], [3]), 0, [5]), told(call_records(1, [7], [8]), 0, [5], width=3)
    tree = tree_of(one, two)
    with pytest.raises(InvariantViolated, match="of one model"):
        tree.routes_T(tree.path_of(next(iter(tree.calls))))
