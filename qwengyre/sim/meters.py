"""What a simulated run is measured by: time by role, idle shares, staleness, moves, and the timelines of a picture."""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.commands import TakeGroup
from qwengyre.scheduler.state import State
from qwengyre.sim.idle import IdleTime
from qwengyre.sim.settings import Pool
from qwengyre.sim.workload import Workload


class StateSpan(msgspec.Struct, frozen=True):
    """A cell was in one state for a while. Seconds."""

    cell: int
    state: str
    start: float
    end: float


class LevelSample(msgspec.Struct, frozen=True):
    at: float
    """seconds"""
    waterlevel: int
    capacity: int


class Timeline(msgspec.Struct, frozen=True):
    roles: list[StateSpan]
    levels: list[LevelSample]
    publishes: list[float]


class Meters:
    """Integrals over the run. Nothing changes between two events, so the time between them is counted by the second."""

    def __init__(self, state: State, workload: Workload, pool: Pool, *, is_recorded: bool):
        self._state = state
        self.idle = IdleTime(state, workload, pool)
        self._is_recorded = is_recorded
        self.finished_at = 0.0
        self.num_moves = 0
        self.num_dropped = 0
        self.compute_s = 0.0
        """Cell-seconds of forward and backward."""
        self.slot_s = 0.0
        """Slot-seconds that servers offered."""
        self.used_slot_s = 0.0
        self.training_s = 0.0
        """Cell-seconds in the training role."""
        self.transit_s = 0.0
        """Cell-seconds in which neither role is served."""
        self._last = 0.0
        self._staleness: list[int] = []
        self._token_staleness = 0.0
        self._num_tokens = 0.0
        self._spans: dict[int, list[tuple[float, float]]] = {}
        self._started: dict[ExecutionId, float] = {}
        self._published_at: list[float] = []
        self._versions: list[int] = []
        self._version_s: list[float] = []
        """Integral of the published version over time, at each publish."""
        self._roles: list[StateSpan] = []
        self._levels: list[LevelSample] = []
        self._since = [(CellState.ROLLOUT, 0.0) for _ in state.cells.all] if is_recorded else []

    def advance(self, at: float) -> None:
        """Count the time since the last event, in which nothing changed."""
        passed = at - self._last
        if passed > 0:
            state = self._state
            cells, placement = state.cells, state.placement
            num_placed = state.waterlevel - len(placement.queue) - len(placement.held)
            self.slot_s += placement.capacity * passed
            self.used_slot_s += num_placed * passed
            self.training_s += (cells.num_alive - cells.num_in_transit - cells.num_in_rollout) * passed
            self.transit_s += cells.num_in_transit * passed
            self.idle.advance(self._last, passed, num_placed)
            self._last = at

    def observe(self, at: float) -> None:
        """Note a version that was published, and of a recorded run what changed."""
        state = self._state
        if state.version >= 0 and (not self._versions or self._versions[-1] != state.version):
            before = self._version_s[-1] + self._versions[-1] * (at - self._published_at[-1]) if self._versions else 0.0
            self._published_at.append(at)
            self._versions.append(state.version)
            self._version_s.append(before)
        if self._is_recorded:
            self._record(at)

    def _record(self, at: float) -> None:
        state = self._state
        sample = LevelSample(at, state.waterlevel, state.capacity)
        if not self._levels or (self._levels[-1].waterlevel, self._levels[-1].capacity) != (sample.waterlevel, sample.capacity):
            self._levels.append(sample)
        for cell in state.cells.all:
            before, since = self._since[cell.cell]
            if cell.state is not before:
                if at > since:
                    self._roles.append(StateSpan(cell.cell, before.value, since, at))
                self._since[cell.cell] = cell.state, at

    def start(self, execution: ExecutionId, at: float) -> None:
        self._started[execution] = at

    def end(self, execution: ExecutionId, group: GroupId, at: float) -> None:
        self._spans.setdefault(group, []).append((self._started.pop(execution), at))

    def take(self, command: TakeGroup) -> None:
        """Count the staleness of a group, and of its tokens, taken as made evenly over each execution."""
        self._staleness.append(command.staleness)
        for start, end in self._spans.pop(command.group, []):
            passed = end - start
            self._num_tokens += passed
            self._token_staleness += command.step * passed - (self._integral(end) - self._integral(start))

    def _integral(self, at: float) -> float:
        """Integral of the published version from 0 to `at`."""
        index = bisect_right(self._published_at, at) - 1
        return self._version_s[index] + self._versions[index] * (at - self._published_at[index])

    @property
    def hours(self) -> float:
        return self.finished_at / 3600

    @property
    def staleness_mean(self) -> float:
        return sum(self._staleness) / len(self._staleness) if self._staleness else 0.0

    @property
    def staleness_max(self) -> int:
        return max(self._staleness, default=0)

    @property
    def staleness_token(self) -> float:
        return self._token_staleness / self._num_tokens if self._num_tokens else 0.0

    @property
    def idle_rollout(self) -> float:
        """Share of the offered slot-time that served nobody."""
        return 1 - self.used_slot_s / self.slot_s if self.slot_s else 0.0

    @property
    def idle_training(self) -> float:
        """Share of the training role's time without forward or backward: waiting, optimizer, publish."""
        return 1 - self.compute_s / self.training_s if self.training_s else 0.0

    @property
    def switching(self) -> float:
        """Share of all cells' time spent between roles."""
        return self.transit_s / (self.finished_at * len(self._state.cells.all)) if self.finished_at else 0.0

    def timeline(self) -> Timeline:
        """Cells, waterlevel and publishes of a recorded run."""
        end = self.finished_at
        tails = [StateSpan(cell, state.value, since, end) for cell, (state, since) in enumerate(self._since) if end > since]
        return Timeline([*self._roles, *tails], self._levels, self._published_at)
