"""What is known of a group before it is dispatched: how long the executions of its task took earlier in this run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from qwengyre.sim.history import MIN_EXECUTION_S, History


def foresee(history: History, task_of: Callable[[int], str], numbers: Iterable[int]) -> tuple[float, ...]:
    """Seconds for each of the training groups `numbers`, in the order of dispatch: the geometric mean over its task's executions.

    0 where no execution of the task has ended. `task_of` gives the task of a training group by its number. A score is never
    looked at.
    """
    logs: dict[str, list[float]] = {}
    trained = (group for group, kind in history.kinds.items() if kind == "train")
    for number, group in enumerate(trained):
        lived = [history.lived[name][1] for name in history.members.get(group, ()) if name in history.lived]
        logs.setdefault(task_of(number), []).extend(math.log(max(MIN_EXECUTION_S, seconds)) for seconds in lived)
    found = [logs.get(task_of(number), []) for number in numbers]
    return tuple(math.exp(sum(known) / len(known)) if known else 0.0 for known in found)
