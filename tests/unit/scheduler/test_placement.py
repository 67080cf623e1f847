"""Placement against a slow reference: least loaded server, ties to the later, destinations from the end of the order."""

from __future__ import annotations

import numpy as np

from qwengyre.core.ids import execution_id
from qwengyre.scheduler.commands import Command, Start
from qwengyre.scheduler.placement import Placement


def test_every_start_goes_to_the_least_loaded_server_as_a_scan_finds_it():
    rng = np.random.default_rng(0)
    placement = Placement()
    for rank, slots in enumerate((2, 5, 3, 7)):
        placement.open(f"s{rank}", slots, rank)
    for index in range(400):
        execution = execution_id(index, 0)
        if rng.random() < 0.45 and placement.live:
            name = list(placement.live)[int(rng.integers(len(placement.live)))]
            live = placement.live[name]
            if live.server is not None:
                placement.end(name, live.attempt)
            continue
        free = [s for s in placement.servers.values() if len(s.executions) < s.slots]
        expected = (
            min(free, key=lambda s: (len(s.executions) / s.slots, -s.rank)).server if free and not placement.queue else None
        )
        out: list[Command] = []
        placement.add(execution, index)
        placement.place(out)
        if expected:
            assert out == [Start(execution, 0, expected)]
    assert placement.capacity == 17


def test_cells_that_leave_together_do_not_hand_over_to_each_other():
    placement = Placement()
    for rank in range(4):
        placement.open(f"s{rank}", 2, rank)
    out: list[Command] = []
    for index in range(4):
        placement.add(execution_id(index, 0), index)
    placement.place(out)
    moves = placement.hand_over(["s0", "s1"])
    assert {move.server for some in moves.values() for move in some} == {"s3", "s2"}
    assert len(placement.live) == 4 and placement.capacity == 4


def test_reopened_server_serves_again_after_thousands_of_changes():
    placement = Placement()
    placement.open("s0", 1, 0)
    for index in range(3000):
        placement.add(execution_id(index, 0), index)
        placement.place([])
        placement.end(execution_id(index, 0), 0)
        if index % 10 == 0:
            placement.hand_over(["s0"])
            placement.open("s0", 1, 0)
    assert len(placement._by_load) < 100, "stale entries are dropped"


def test_sorting_the_newest_leaves_who_waited_before_where_they_are():
    placement = Placement()
    for group in (0, 1, 2, 3):
        for index in range(2):
            placement.add(execution_id(group, index), group)
    placement.sort_newest(6, lambda group: {1: 5.0, 2: 5.0, 3: -1.0}[group])
    assert [live.execution for live in placement.queue] == [
        *(execution_id(group, index) for group in (0, 3, 1, 2) for index in range(2))
    ]
