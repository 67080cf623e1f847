"""When executions end on servers, under the two load models of a workload.

`Independent`: an execution takes its unloaded duration wherever it is. `Shared`: decode throughput is shared by the
executions of a server, so all of them progress at one rate that depends on their number. Both cost O(log n) a change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.sim.workload import Workload

Schedule = Callable[[float, ExecutionId, int], None]
"""schedule(at, execution, stamp): call `is_due(execution, stamp)` at that time."""


class Servers(Protocol):
    def start(self, execution: ExecutionId, server: ServerId, at: float, unloaded_s: float) -> None:
        """Begin an execution that needs `unloaded_s` seconds of an unloaded server."""

    def move(self, execution: ExecutionId, server: ServerId | None, at: float, stall_s: float) -> None:
        """Go on elsewhere after losing `stall_s`; with None it waits until it is moved again."""

    def is_due(self, execution: ExecutionId, stamp: int) -> bool:
        """Whether a scheduled end still stands."""

    def end(self, execution: ExecutionId, at: float) -> None:
        """Take an execution out, ended or dropped."""


class Independent:
    """Durations that no load changes."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._stamps: dict[str, int] = {}
        self._ends: dict[str, float] = {}
        self._left: dict[str, float] = {}
        """What held executions still need."""

    def start(self, execution: ExecutionId, server: ServerId, at: float, unloaded_s: float) -> None:
        self._stamps[execution] = 0
        self._ends[execution] = at + unloaded_s
        self._schedule(at + unloaded_s, execution, 0)

    def move(self, execution: ExecutionId, server: ServerId | None, at: float, stall_s: float) -> None:
        self._stamps[execution] += 1
        left = self._left.pop(execution, None)
        if left is None:
            left = self._ends[execution] - at
        if server is None:
            self._left[execution] = left
            return
        self._ends[execution] = at + left + stall_s
        self._schedule(self._ends[execution], execution, self._stamps[execution])

    def is_due(self, execution: ExecutionId, stamp: int) -> bool:
        return self._stamps.get(execution) == stamp

    def end(self, execution: ExecutionId, at: float) -> None:
        del self._stamps[execution]
        self._ends.pop(execution)
        self._left.pop(execution, None)


class _Rates(dict[int, float]):
    """`decode_rate` by number of executions, computed when it is first asked for."""

    def __init__(self, workload: Workload, nodes: int):
        super().__init__()
        self._workload, self._nodes = workload, nodes

    def __missing__(self, num: int) -> float:
        rate = self[num] = decode_rate(self._workload, num, self._nodes)
        return rate


class _Loaded:
    """A server whose executions progress at one common rate: `progress` is what each has done since it was empty."""

    __slots__ = ("goals", "nodes", "num", "progress", "rates", "stamp", "updated")

    def __init__(self, nodes: int, rates: _Rates):
        self.nodes, self.rates = nodes, rates
        self.num = 0
        self.progress = 0.0
        self.updated = 0.0
        self.goals: list[tuple[float, ExecutionId]] = []
        self.stamp = 0


class Shared:
    """Decode throughput is shared: n executions on a server each run at `decode_rate`."""

    def __init__(self, schedule: Schedule, workload: Workload, nodes_of: Callable[[ServerId], int]):
        self._schedule, self._workload, self._nodes_of = schedule, workload, nodes_of
        self._servers: dict[str, _Loaded] = {}
        self._rates: dict[int, _Rates] = {}
        self._goal: dict[str, float] = {}
        self._at: dict[str, _Loaded] = {}
        self._left: dict[str, float] = {}

    def start(self, execution: ExecutionId, server: ServerId, at: float, unloaded_s: float) -> None:
        self._enter(execution, self._server(server), at, unloaded_s)

    def move(self, execution: ExecutionId, server: ServerId | None, at: float, stall_s: float) -> None:
        left = self._left.pop(execution, None)
        if left is None:
            left = self._leave(execution, at)
        if server is None:
            self._left[execution] = left
        else:
            self._enter(execution, self._server(server), at, left + stall_s)

    def is_due(self, execution: ExecutionId, stamp: int) -> bool:
        loaded = self._at.get(execution)
        return loaded is not None and loaded.stamp == stamp

    def end(self, execution: ExecutionId, at: float) -> None:
        if self._left.pop(execution, None) is None:
            self._leave(execution, at)

    def _server(self, server: ServerId) -> _Loaded:
        if server not in self._servers:
            nodes = self._nodes_of(server)
            rates = self._rates.setdefault(nodes, _Rates(self._workload, nodes))
            self._servers[server] = _Loaded(nodes, rates)
        return self._servers[server]

    def _enter(self, execution: ExecutionId, loaded: _Loaded, at: float, left: float) -> None:
        self._advance(loaded, at)
        loaded.num += 1
        goal = self._goal[execution] = loaded.progress + left
        self._at[execution] = loaded
        heapq.heappush(loaded.goals, (goal, execution))
        self._reschedule(loaded, at)

    def _leave(self, execution: ExecutionId, at: float) -> float:
        loaded = self._at.pop(execution)
        self._advance(loaded, at)
        loaded.num -= 1
        left = self._goal.pop(execution) - loaded.progress
        self._reschedule(loaded, at)
        return max(0.0, left)

    def _advance(self, loaded: _Loaded, at: float) -> None:
        loaded.progress += (at - loaded.updated) * loaded.rates[loaded.num]
        loaded.updated = at

    def _reschedule(self, loaded: _Loaded, at: float) -> None:
        """Announce the server's next end; earlier announcements no longer stand."""
        goals = loaded.goals
        while goals and (self._goal.get(goals[0][1]) != goals[0][0] or self._at[goals[0][1]] is not loaded):
            heapq.heappop(goals)
        loaded.stamp += 1
        if goals:
            goal, execution = goals[0]
            left = max(0.0, goal - loaded.progress)
            self._schedule(at + left / loaded.rates[loaded.num], execution, loaded.stamp)


def decode_rate(workload: Workload, num: int, nodes: int) -> float:
    """Progress of each of `num` executions on a server of `nodes` nodes, unloaded = 1.

    1 / ((1-g) + g*s) with s = 1 + (slowdown-1) * a / slots_per_node and a, the executions per node that decode now,
    = num / nodes * g*s / ((1-g) + g*s): the fixed point in s is the positive root of a quadratic.
    """
    g, extra = workload.decode_share, (workload.slowdown - 1) * num / nodes / workload.slots_per_node
    if g == 0 or extra == 0:
        return 1.0
    # s ((1-g) + g s) = (1-g) + g s + extra g s  <=>  g s^2 + (1 - 2g - extra g) s - (1-g) = 0
    b = 1 - 2 * g - extra * g
    s = (-b + (b * b + 4 * g * (1 - g)) ** 0.5) / (2 * g)
    return float(1 / ((1 - g) + g * s))
