from __future__ import annotations

import pytest

from qwengyre.buffer.groups import GroupBuffer
from qwengyre.buffer.queue import MicroStepQueue
from qwengyre.core.errors import IllegalTransition


def ready(buffer: GroupBuffer, group: int, version: int) -> None:
    buffer.dispatch(group, "train", version=version, num_executions=1)
    buffer.end_execution(group)
    buffer.set_ready(group, [f"m{group}"], num_valid=1)


def test_group_is_complete_when_all_its_executions_have_ended():
    buffer = GroupBuffer()
    buffer.dispatch(3, "train", version=0, num_executions=2)
    assert buffer.end_execution(3).num_left == 1 and buffer.unprepared() == []
    assert buffer.end_execution(3).num_left == 0 and buffer.unprepared() == [3]


def test_incomplete_unknown_and_evaluation_groups_cannot_be_offered():
    buffer = GroupBuffer()
    buffer.dispatch(0, "train", version=0, num_executions=1)
    buffer.dispatch(1, "evaluation", version=0, num_executions=1)
    buffer.end_execution(1)
    for group in (0, 1, 9):
        with pytest.raises(IllegalTransition):
            buffer.set_ready(group, [], num_valid=0)


def test_oldest_version_comes_first_then_the_first_dispatched():
    buffer = GroupBuffer()
    for group, version in ((5, 2), (4, 0), (7, 0)):
        ready(buffer, group, version)
    assert buffer.oldest_ready == 0
    assert [buffer.take().group for _ in range(3)] == [4, 7, 5]


def test_group_that_is_put_back_has_its_old_place():
    buffer = GroupBuffer()
    ready(buffer, 0, 0)
    ready(buffer, 1, 1)
    lost = buffer.take()
    buffer.put_back(lost)
    assert buffer.take() is lost and buffer.num_ready == 1


def test_unready_groups_are_counted_by_version():
    buffer = GroupBuffer()
    for group, version in enumerate((0, 0, 3)):
        buffer.dispatch(group, "train", version=version, num_executions=1)
    buffer.dispatch(3, "evaluation", version=0, num_executions=1)
    assert buffer.unready_before(4) == [(0, 2), (3, 1)] and buffer.unready_before(3) == [(0, 2)] and buffer.newest_unready == 3
    buffer.end_execution(0)
    buffer.set_ready(0, [], num_valid=0)
    assert buffer.unready_before(1) == [(0, 1)]


def test_claims_are_first_in_first_out_and_a_lost_claim_comes_first_again():
    queue = MicroStepQueue()
    queue.put(["a", "b", "c"])
    first, second = queue.claim(), queue.claim()
    queue.put(["d"])
    queue.put_back(second)
    queue.put_back(first)
    assert queue.waiting() == ["a", "b", "c", "d"]
    assert [queue.claim().micro_step for _ in range(4)] == ["a", "b", "c", "d"]
    with pytest.raises(IndexError):
        queue.claim()
