"""One moment of a run, and whoever shows it: the controller fills the one and knows no more of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from qwengyre.telemetry.records import CellRole

NUM_STEPS_AVERAGED: Final = 8  # smooths bursts, and still follows a change of pace


class CellView(msgspec.Struct, frozen=True):
    cell: int
    """0 is the core."""
    role: CellRole
    num_calls: int = 0
    """Calls that run or wait in its engine."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    """Seconds on the run's clock."""
    name: str
    policy: str
    doing: str
    """The phase in a word or two: `starting`, `starting cells`, `evaluation`, `training`, `audit`."""
    step: int
    """Optimizer steps done."""
    num_steps: int
    version: int
    """Version that the engines serve."""
    cells: tuple[CellView, ...]
    waterlevel: int
    capacity: int
    max_capacity: int
    """Capacity with all cells in rollout: the length of the bar."""
    groups_done: int
    groups_open: int
    executions_finished: int
    executions_running: int
    rewards: tuple[float, ...] = ()
    """Mean reward of every step so far."""
    score_before: float | None = None
    """Held-out, version 0."""
    score_now: float | None = None
    """Held-out, the last evaluation."""
    tokens_per_s: float = 0.0
    memory_gb: float = 0.0
    remaining_s: float | None = None


def estimate_remaining(step_ends_s: Sequence[float], num_steps: int) -> float | None:
    """Seconds for the steps still to do, at the pace of the last ones; None before the second step has ended.

    >>> estimate_remaining([10.0, 14.0, 18.0], num_steps=10)
    28.0
    """
    recent = step_ends_s[-NUM_STEPS_AVERAGED - 1 :]
    if len(recent) < 2:
        return None
    pace = (recent[-1] - recent[0]) / (len(recent) - 1)
    return pace * (num_steps - len(step_ends_s))


class Screen(Protocol):
    """What a run tells during its course: `dashboard/live.py` on a terminal."""

    def update(self, view: View) -> None:
        """This moment, in place of the one before. Called a few times a second."""
        ...

    def say(self, line: str) -> None:
        """A line that stays: an evaluation, a lost cell, a journal that was cut."""
        ...

    def progress(self, line: str) -> None:
        """Progress before there is a view."""
        ...

    def announce(self, line: str) -> None:
        """A line without a time: where the run folder is."""
        ...
