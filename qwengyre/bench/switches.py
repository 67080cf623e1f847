"""When the cells of a run changed roles, burst by burst: what a real run and a simulated one are compared by."""

from __future__ import annotations

import msgspec


class Switch(msgspec.Struct, frozen=True):
    burst: int
    """Version that was published when it began."""
    cell: int
    kind: str
    """`leaves` the rollout role, or `returns` to it."""
    at: float
    """Seconds since the run began."""


class Switches(msgspec.Struct, frozen=True):
    all: tuple[Switch, ...]
    bursts: tuple[tuple[int, float], ...]
    """(version, when it was published), in order."""
    end: float

    def scaled(self, by: float) -> Switches:
        """The same on another clock."""
        return Switches(
            tuple(msgspec.structs.replace(switch, at=switch.at * by) for switch in self.all),
            tuple((burst, at * by) for burst, at in self.bursts),
            self.end * by,
        )

    def per_burst(self) -> list[int]:
        return [len(self.of_burst(burst)) for burst, _ in self.bursts]

    def of_burst(self, burst: int) -> list[Switch]:
        return [switch for switch in self.all if switch.burst == burst]

    def lengths(self) -> dict[int, float]:
        """Seconds of each burst."""
        starts = [at for _, at in self.bursts] + [self.end]
        return {burst: starts[index + 1] - at for index, (burst, at) in enumerate(self.bursts)}


def worst_gap(measured: Switches, simulated: Switches) -> float | None:
    """Largest |time of a switch in its burst, measured - simulated| / length of the simulated burst.

    Switches of one burst are compared in order; a burst with one more or less on a side is compared as far as both go. None if
    there is nothing to compare.
    """
    gaps: list[float] = []
    starts = dict(measured.bursts), dict(simulated.bursts)
    for burst, length in simulated.lengths().items():
        if burst not in starts[0] or length <= 0:
            continue
        pairs = zip(measured.of_burst(burst), simulated.of_burst(burst), strict=False)
        gaps += [abs((one.at - starts[0][burst]) - (other.at - starts[1][burst])) / length for one, other in pairs]
    return max(gaps, default=None)
