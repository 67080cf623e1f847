"""The steps of a run as they count: one that is done again, after a loss of the core or a resume, counts once."""

from __future__ import annotations

from qwengyre.telemetry.records import StepFinished


class StepHistory:
    """
    >>> history = StepHistory()
    >>> history.rewards, history.staleness_mean, history.clip_fraction
    ((), 0.0, 0.0)
    """

    def __init__(self) -> None:
        self._steps: list[StepFinished] = []

    def add(self, finished: StepFinished) -> None:
        """The next step, or an earlier one again: then those after it were undone, too."""
        self._steps = [step for step in self._steps if step.step < finished.step] + [finished]

    @property
    def all(self) -> tuple[StepFinished, ...]:
        return tuple(self._steps)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(step.reward_mean for step in self._steps)

    @property
    def ends_s(self) -> list[float]:
        """On the run's clock."""
        return [step.at for step in self._steps]

    @property
    def staleness_mean(self) -> float:
        """Over all groups that were trained on."""
        num_groups = sum(step.num_groups for step in self._steps)
        return sum(step.staleness_mean * step.num_groups for step in self._steps) / max(1, num_groups)

    @property
    def staleness_max(self) -> int:
        return max((step.staleness_max for step in self._steps), default=0)

    @property
    def clip_fraction(self) -> float:
        """Over all trajectories that were trained on."""
        num_trajectories = sum(step.num_trajectories for step in self._steps)
        return sum(step.clip_fraction * step.num_trajectories for step in self._steps) / max(1, num_trajectories)
