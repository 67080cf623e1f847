"""What a run knows of a task before its next group starts."""

from __future__ import annotations

import pytest

from qwengyre.core.ids import GroupId, execution_id
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.sim.foresight import foresee
from qwengyre.sim.history import History

TASKS = ["a", "b", "a", "c", "b", "a"]


def test_a_task_takes_as_long_as_its_earlier_executions_and_evaluations_do_not_count():
    history = History()
    kinds = ["evaluation", "train", "train", "train"]
    names = [[execution_id(GroupId(group), index) for index in range(2)] for group in range(4)]
    for group, kind in enumerate(kinds):
        starts = [cmd.Start(name, 0, "cell-0") for name in names[group]]
        history.see(ev.RunStarted(at=0.0), [cmd.Dispatch(GroupId(group), kind, 0, 2), *starts])
    for at, group, index in ((1.0, 0, 0), (2.0, 1, 0), (4.0, 2, 1), (8.0, 1, 1), (16.0, 3, 0)):
        history.see(ev.ExecutionEnded(at, names[group][index], 0), [])
    a, b, c = (2.0 * 8.0 * 16.0) ** (1 / 3), 4.0, 0.0
    assert foresee(history, TASKS.__getitem__, range(3, 6)) == pytest.approx((c, b, a))
