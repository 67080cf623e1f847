"""Where the time of a simulated run went that is not work: node-seconds by cause, and what they make of the gap to the work bound.

Every node is at every moment in one of: a slot-share of it serves, the rest of a server is idle; it trains, or waits in training;
it is between roles. So the causes add up to all node-time, exactly.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from qwengyre.scheduler.state import State
from qwengyre.scheduler.training import StepState
from qwengyre.sim.bounds import Least
from qwengyre.sim.settings import Pool
from qwengyre.sim.workload import Workload


class IdleCause(IntEnum):
    """Why a node did nothing."""

    WARM_UP = 0
    """Nothing has been ready yet, since the run began."""
    RUN_OUT = 1
    """All executions of the run have started: what idles now has no more to do than the last steps."""
    STRAGGLERS = 2
    """Training waits for groups of which an execution still runs, and the slots have nobody to serve either."""
    SPLIT = 3
    """A fixed split: servers that may not train."""
    CELLS = 4
    """Free slots, fewer than a cell has: only whole cells change role."""
    MICRO_STEPS = 5
    """The end of a step: others compute its last micro-steps."""
    OPTIMIZER = 6
    PUBLISH = 7
    SWITCHES = 8
    """Between roles, and free slots that a cell in transit keeps from leaving."""


LOAD: Final = "load"
"""Slots in use beyond the least: servers that are not full (which decode less than they could), and stalls of moves."""
REPLICAS: Final = "replicas"
"""Training beyond the least: what each further replica costs, and executions that moves may have made too late."""


class Spent(NamedTuple):
    """Node-seconds of a whole run."""

    by_cause: tuple[float, ...]
    """By `IdleCause`."""
    serving: float
    """Of slots in use."""
    computing: float
    """Of forward and backward."""

    def parts(self, nodes: int, least: Least) -> dict[str, float]:
        """Hours of the whole pool by part of the gap; they add up to the time minus the work bound, which is that of `least`."""
        used = {
            LOAD: self.serving - float(least.rollout_G.sum()),
            REPLICAS: self.computing - float(least.train_G.sum()),
        }
        by_name = {cause.name.lower(): self.by_cause[cause] for cause in IdleCause} | used
        return {name: seconds / nodes / 3600 for name, seconds in by_name.items()}


class IdleTime:
    """Counts node-seconds by cause: each time that passes between two events, once it is over."""

    def __init__(self, state: State, workload: Workload, pool: Pool):
        self._state = state
        self._num_groups = workload.num_groups
        config = state.config
        self._cell_nodes, self._standalone_nodes = pool.cell_nodes, pool.standalone_nodes
        self._standalone_slots = config.num_standalone * config.slots_per_standalone
        self._slots_per_cell = config.slots_per_cell
        self._num_replicas = pool.num_replicas(workload)
        self._is_fixed = not config.traits.switches
        self._busy: list[float] = []
        """When each replica that computes is done, where a cell has several."""
        self._by_cause = [0.0] * len(IdleCause)
        self._serving = 0.0
        self._computing = 0.0
        self._capacity = -1
        self._serving_nodes = 0.0
        """Nodes of servers that take executions, which have `_capacity` slots."""

    def compute(self, until: float) -> None:
        """A replica computes until then."""
        if self._num_replicas > 1:
            self._busy.append(until)

    def advance(self, since: float, passed: float, num_placed: int) -> None:
        """Count the time since `since`, in which the state was what it is now, and `num_placed` slots were in use."""
        state, by_cause = self._state, self._by_cause
        cells = state.cells
        capacity, transit, num_rollout = state.placement.capacity, cells.num_in_transit, cells.num_in_rollout
        if capacity != self._capacity:
            in_cells = (capacity - self._standalone_slots) / self._slots_per_cell
            self._capacity, self._serving_nodes = capacity, in_cells * self._cell_nodes + self._standalone_nodes
        served = self._serving_nodes * num_placed / capacity if capacity else 0.0
        phase = self._phase()
        self._serving += served * passed
        idle = num_rollout * self._cell_nodes + self._standalone_nodes - served
        by_cause[self._why_idle(phase, capacity - num_placed)] += idle * passed
        if transit:
            by_cause[IdleCause.SWITCHES] += transit * self._cell_nodes * passed
        num_training = cells.num_alive - transit - num_rollout
        if num_training:
            busy_s = len(state.training.claims) * passed if self._num_replicas == 1 else self._busy_s(since, passed)
            computing = busy_s * self._cell_nodes
            self._computing += computing
            by_cause[self._why_waiting(phase)] += num_training * self._cell_nodes * passed - computing

    def _busy_s(self, since: float, passed: float) -> float:
        """Cell-seconds: each replica is its share of a cell."""
        found = sum(max(0.0, min(until, since + passed) - since) for until in self._busy)  # rounding may leave one that is done
        self._busy = [until for until in self._busy if until > since + passed]
        return found / self._num_replicas

    def _phase(self) -> IdleCause | None:
        state = self._state
        if state.steps_done == 0 and not state.training.taken and not state.groups.num_ready:
            return IdleCause.WARM_UP
        return IdleCause.RUN_OUT if state.num_train_groups == self._num_groups and not state.placement.queue else None

    def _why_idle(self, phase: IdleCause | None, num_free: int) -> IdleCause:
        """Of nodes in rollout."""
        if phase is not None:
            return phase
        if self._is_fixed:
            return IdleCause.SPLIT
        if num_free < self._slots_per_cell:
            return IdleCause.CELLS
        if self._state.training.state is StepState.PUBLISHING:
            return IdleCause.PUBLISH
        return IdleCause.SWITCHES if self._state.cells.num_in_transit else IdleCause.STRAGGLERS

    def _why_waiting(self, phase: IdleCause | None) -> IdleCause:
        """Of nodes in training."""
        training = self._state.training
        step = training.state
        if step is StepState.PUBLISHING:
            return IdleCause.PUBLISH
        if step is StepState.OPTIMIZING:
            return IdleCause.OPTIMIZER
        is_whole = len(training.taken) == self._state.config.groups_per_step
        if step is StepState.REDUCING or (step is StepState.OPEN and is_whole):
            return IdleCause.MICRO_STEPS
        return IdleCause.STRAGGLERS if phase is None else phase

    def spent(self) -> Spent:
        return Spent(tuple(self._by_cause), self._serving, self._computing)
