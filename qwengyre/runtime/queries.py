"""Which task a rollout group runs: a function of the seed and the group's place in the order of dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class EvaluationPlan(msgspec.Struct, frozen=True):
    """One evaluation round: every held-out task sampled `samples` times and, when asked, once greedily."""

    tasks: tuple[str, ...]
    samples: int
    greedy: bool
    temperature: float

    def group_sizes(self) -> tuple[int, ...]:
        """Executions of each group of a round, in order: all sampled groups, then all greedy ones.

        >>> EvaluationPlan(("a", "b"), samples=4, greedy=True, temperature=1.0).group_sizes()
        (4, 4, 1, 1)
        """
        return (self.samples,) * len(self.tasks) + (1,) * (len(self.tasks) if self.greedy else 0)

    def group(self, index: int) -> tuple[str, float]:
        """Task and temperature of the `index`-th group of a round."""
        greedy, place = divmod(index, len(self.tasks))
        return self.tasks[place], 0.0 if greedy else self.temperature


class TrainingOrder:
    """Tasks in shuffled passes: every task once before any comes again.

    >>> order = TrainingOrder(["a", "b", "c"], seed=7)
    >>> sorted(order.task(i) for i in range(3)), sorted(order.task(i) for i in range(3, 6))
    (['a', 'b', 'c'], ['a', 'b', 'c'])
    """

    def __init__(self, tasks: Sequence[str], seed: int) -> None:
        self._tasks, self._seed = tuple(tasks), seed

    def task(self, index: int) -> str:
        number, place = divmod(index, len(self._tasks))
        order = np.random.default_rng((self._seed, number)).permutation(len(self._tasks))
        return self._tasks[int(order[place])]
