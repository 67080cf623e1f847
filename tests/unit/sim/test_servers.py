"""When executions end under the two load models."""

from __future__ import annotations

import msgspec
import pytest

from qwengyre.sim.servers import Independent, Shared, decode_rate
from qwengyre.sim.workload import builtin_workloads

LOADED = builtin_workloads()["nl122_v2"]


class Calls:
    """Collects what was scheduled; the last announcement of an execution that still stands is its end."""

    def __init__(self) -> None:
        self.all: list[tuple[float, str, int]] = []

    def __call__(self, at: float, execution: str, stamp: int) -> None:
        self.all.append((at, execution, stamp))


@pytest.mark.parametrize("num", [1, 7, 50, 204])
@pytest.mark.parametrize(("share", "slowdown"), [(0.7, 1.75), (0.2, 3.0), (1.0, 2.0)])
def test_decode_rate_is_the_fixed_point_of_its_definition(num: int, share: float, slowdown: float):
    workload = msgspec.structs.replace(LOADED, decode_share=share, slowdown=slowdown)
    s = 1.0
    for _ in range(10_000):
        decoding = num / 4 * share * s / ((1 - share) + share * s)
        s = 1 + (slowdown - 1) * decoding / workload.slots_per_node
    assert decode_rate(workload, num, 4) == pytest.approx(1 / ((1 - share) + share * s), rel=1e-9)


def test_full_server_that_only_decodes_is_slower_by_the_slowdown():
    workload = msgspec.structs.replace(LOADED, decode_share=1.0, slots_per_node=10.0)
    assert decode_rate(workload, 40, 4) == pytest.approx(1 / workload.slowdown)


def test_independent_execution_ends_after_its_duration_and_a_move_costs_the_stall():
    calls = Calls()
    servers = Independent(calls)
    servers.start("e", "cell-0", 10.0, 100.0)
    assert calls.all == [(110.0, "e", 0)]
    servers.move("e", "cell-1", 50.0, 5.0)
    assert calls.all[-1] == (115.0, "e", 1)
    assert not servers.is_due("e", 0) and servers.is_due("e", 1)


def test_held_execution_makes_no_progress():
    calls = Calls()
    servers = Independent(calls)
    servers.start("e", "cell-0", 0.0, 100.0)
    servers.move("e", None, 40.0, 0.0)
    servers.move("e", "cell-1", 1000.0, 5.0)
    assert calls.all[-1][0] == 1065.0
    servers.move("e", None, 1010.0, 0.0)
    servers.end("e", 1010.0)
    assert not servers.is_due("e", 3)


def test_shared_server_slows_down_with_each_execution_and_recovers():
    calls = Calls()
    servers = Shared(calls, LOADED, lambda server: 4)
    one, two = decode_rate(LOADED, 1, 4), decode_rate(LOADED, 2, 4)
    servers.start("a", "cell-0", 0.0, 100.0)
    servers.start("b", "cell-0", 10.0, 500.0)
    at, execution, stamp = calls.all[-1]
    assert execution == "a" and at == pytest.approx(10.0 + (100.0 - 10.0 * one) / two)
    assert servers.is_due("a", stamp) and not servers.is_due("a", calls.all[0][2])
    servers.end("a", at)
    later, execution, _ = calls.all[-1]
    assert execution == "b" and later == pytest.approx(at + (500.0 - (at - 10.0) * two) / one)


def test_shared_execution_takes_its_remaining_work_along():
    calls = Calls()
    servers = Shared(calls, LOADED, lambda server: 4)
    one = decode_rate(LOADED, 1, 4)
    servers.start("a", "cell-0", 0.0, 100.0)
    servers.move("a", "cell-1", 20.0, 5.0)
    assert calls.all[-1][:2] == (pytest.approx(20.0 + (100.0 - 20.0 * one + 5.0) / one), "a")
    servers.move("a", None, 30.0, 0.0)
    servers.move("a", "cell-0", 500.0, 0.0)
    assert calls.all[-1][0] == pytest.approx(500.0 + (105.0 - 30.0 * one) / one)
