"""Times and counts of a simulation in words: a run of minutes is told in minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class TimeUnit(NamedTuple):
    name: str
    sign: str
    per_hour: float

    def of(self, hours: float) -> float:
        return hours * self.per_hour

    def show(self, hours: float, digits: int = 1) -> str:
        return f"{self.of(hours):.{digits}f} {self.sign}"


HOURS: Final = TimeUnit("hours", "h", 1.0)
_SMALLER: Final = (TimeUnit("minutes", "min", 60.0), TimeUnit("seconds", "s", 3600.0))


def unit_for(longest_hours: float) -> TimeUnit:
    """The largest unit of which `longest_hours` has at least one; one chart has one unit.

    >>> [unit_for(hours).sign for hours in (1.0, 0.5, 0.01, 0.0)]
    ['h', 'min', 's', 's']
    """
    return next((unit for unit in (HOURS, *_SMALLER) if unit.of(longest_hours) >= 1), _SMALLER[-1])


def show_hours(hours: float) -> str:
    """
    >>> show_hours(71.62), show_hours(0.21), show_hours(0.005)
    ('71.6 h', '12.6 min', '18.0 s')
    """
    return unit_for(hours).show(hours)


def num_seeds(seeds: Sequence[int]) -> str:
    """
    >>> num_seeds([7]), num_seeds([7, 8])
    ('1 seed', '2 seeds')
    """
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"
