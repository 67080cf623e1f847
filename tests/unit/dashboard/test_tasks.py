"""What a page says of a task, from the rewards of its groups."""

import pytest

from qwengyre.core.ids import GroupId
from qwengyre.dashboard.executions import GroupEntry
from qwengyre.dashboard.task_pages import GroupReward, TaskHistory

SAMPLED, GREEDY = False, True


def history(*groups: tuple[bool, tuple[float, ...]]) -> TaskHistory:
    entries = [
        GroupReward(
            GroupEntry(group=GroupId(number), kind="evaluation", version=number, num_executions=len(rewards)), greedy, rewards
        )
        for number, (greedy, rewards) in enumerate(groups)
    ]
    return TaskHistory("a-task", tuple(entries))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([(SAMPLED, (0.0, 0.0))], "never above 0"),
        ([(SAMPLED, (0.0, 0.5))], "never solved"),
        ([(SAMPLED, (0.0, 1.0))], "solved at times"),
        ([(SAMPLED, (1.0, 0.0)), (SAMPLED, (1.0, 1.0))], "solved by all of the last group"),
        ([(SAMPLED, (1.0, 0.5)), (GREEDY, (1.0,))], "solved at times"),
        ([(GREEDY, (1.0,))], "solved by all of the last group"),
    ],
)
def test_a_task_is_solved_by_all_only_when_the_last_sampled_group_did(groups, said):
    """A greedy evaluation is one execution: it says nothing of the share that solves the task."""
    assert history(*groups).verdict[0] == said
