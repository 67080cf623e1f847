"""The invariants of docs/scheduler.md, checked from scratch against the whole state, independently of how it is kept."""

from __future__ import annotations

from collections import Counter

from qwengyre.core.errors import InvariantViolated
from qwengyre.core.ids import CORE
from qwengyre.scheduler.cells import TRANSIT, CellState
from qwengyre.scheduler.policies import Policy
from qwengyre.scheduler.state import State
from qwengyre.scheduler.training import StepState


class Invariants:
    """Checks a state against its rules and, for those about change, against what it was at the last check."""

    def __init__(self) -> None:
        self._burst: tuple[int, int] | None = None
        """Burst and waterlevel at the last check."""
        self._ended = 0
        self._num_out_of_rollout = 0
        self._num_groups_due = 0
        """The most that (v + phi + mu) * B was at a publish so far."""

    def check(self, state: State, policy: Policy) -> None:
        """Raises InvariantViolated with the rule that does not hold."""
        _check_placement(state, policy)
        _check_counts(state)
        _check_roles(state)
        _check_step(state)
        self._check_change(state, policy)

    def _check_change(self, state: State, policy: Policy) -> None:
        now = state.num_bursts, state.waterlevel
        if state.version >= 0 and (self._burst is None or self._burst[0] != state.num_bursts):
            self._num_groups_due = max(self._num_groups_due, state.config.num_groups_due(state.version))
        if state.num_train_groups != self._num_groups_due:
            _fail("dispatched = min(S*B, (v + phi + mu) * B)", f"{state.num_train_groups} at version {state.version}")
        if self._burst is not None and self._burst[0] == now[0] and now[1] > self._burst[1]:
            _fail("w never rises inside a burst", f"{self._burst[1]} -> {now[1]} at version {state.version}")
        if state.num_ended < self._ended:
            _fail("an execution ends once", f"{self._ended} -> {state.num_ended} ended")
        draining = [c for c in state.cells.all if c.state is CellState.DRAINING and not c.is_turning]
        has_left = draining and self._num_out_of_rollout < len(state.cells.prefix)
        if has_left and state.config.traits.switches and not policy.pauses and state.waterlevel > state.capacity:
            _fail("what stays can serve w when a cell leaves", f"w = {state.waterlevel} > C = {state.capacity}")
        self._burst, self._ended, self._num_out_of_rollout = now, state.num_ended, len(state.cells.prefix)


def _fail(rule: str, detail: str) -> None:
    raise InvariantViolated(rule, detail)


def _check_placement(state: State, policy: Policy) -> None:
    """No execution without a server, a hold or a place in the queue; no server beyond its slots; none idle beside a queue."""
    placement = state.placement
    open_cells = {c.server for c in state.cells.all if c.state is CellState.ROLLOUT and policy.serves(state, c)}
    open_engines = {f"standalone-{i}" for i, is_alive in enumerate(state.standalone_alive) if is_alive}
    if state.version >= 0 and set(placement.servers) != open_cells | open_engines:
        _fail(
            "a server is open while its cell is in rollout", f"{sorted(placement.servers)} != {sorted(open_cells | open_engines)}"
        )
    placed = Counter({live.execution: 1 for live in placement.queue})
    placed.update(placement.held.keys())
    for server in placement.servers.values():
        placed.update(server.executions.keys())
        if len(server.executions) > server.slots:
            _fail("a server has a slot for each of its executions", f"{server.server}: {len(server.executions)} > {server.slots}")
        for execution in server.executions:
            if placement.live[execution].server is not server:
                _fail("an execution is where it is said to be", execution)
    if placed.keys() != placement.live.keys() or any(count != 1 for count in placed.values()):
        _fail("every live execution has one server, hold or place in the queue", str(placed - Counter(placement.live.keys())))
    if placement.capacity != sum(server.slots for server in placement.servers.values()):
        _fail("C_R is the sum of the open slots", str(placement.capacity))
    num_placed = sum(len(server.executions) for server in placement.servers.values())
    if not state.is_finished and num_placed < placement.capacity and (placement.queue or placement.held):
        _fail("nobody waits beside a free slot", f"{num_placed} < {placement.capacity}")


def _check_counts(state: State) -> None:
    if state.waterlevel != len(state.placement.live):
        _fail("w = d - f counts the live executions", f"{state.waterlevel} != {len(state.placement.live)}")
    config, groups = state.config, state.groups
    num_evaluating = sum(state.evaluation_left.values())
    consumed = sum(len(g) for step, g in state.consumed.items() if step >= state.steps_done)
    accounted = groups.num_out - num_evaluating + groups.num_ready + len(state.training.taken) + consumed
    if accounted + state.steps_done * config.groups_per_step != state.num_train_groups:
        _fail(
            "a group is out, ready, in the open step or in a step that was done, once", f"{accounted} + {state.steps_done} steps"
        )


def _check_roles(state: State) -> None:
    cells = state.cells
    states = Counter(cell.state for cell in cells.all)
    if cells.num_in_transit != sum(states[s] for s in TRANSIT) or cells.num_alive != len(cells.all) - states[CellState.LOST]:
        _fail("cells are counted by state", str(states))
    traits = state.config.traits
    if not traits.switches:
        if any(
            c.state is not CellState.ROLLOUT and c.cell >= state.config.training_cells
            for c in cells.all
            if c.state is not CellState.LOST
        ):
            _fail("a fixed split moves no cell", str(states))
        return
    leaving = [c for c in cells.all if c.state in (CellState.DRAINING, CellState.TO_TRAINING) and not c.is_turning]
    if traits.leaves_one_by_one and len(leaving) > 1:
        _fail("one transition at a time", ", ".join(f"cell {c.cell}" for c in leaving))
    prefix = [c for c in cells.all if c.state is CellState.TRAINING] + leaving
    if {c.cell for c in prefix} != {c.cell for c in cells.prefix}:
        _fail("the prefix is who left and was not sent back", f"{[c.cell for c in prefix]} != {[c.cell for c in cells.prefix]}")
    ranks_out = [c.rank for c in cells.all if c.state is CellState.ROLLOUT]
    if prefix and ranks_out and max(c.rank for c in prefix) > min(ranks_out):
        _fail("training cells are a prefix of the order", f"{[c.cell for c in prefix]} of {cells.order()}")
    if prefix and cells.core.state is CellState.LOST:
        _fail("nobody trains without the core", str([c.cell for c in prefix]))


def _check_step(state: State) -> None:
    training, config = state.training, state.config
    trains = {c.cell for c in state.cells.all if c.state is CellState.TRAINING}
    in_step = training.members.keys() | training.joining.keys() | training.waiting.keys()
    if in_step - trains or (trains - {CORE}) - in_step:
        _fail("a cell in training is a member, joins or waits", f"{sorted(in_step)} of {sorted(trains)}")
    if len(training.members) + len(training.joining) + len(training.waiting) != len(in_step):
        _fail("a cell has one place in the step", f"{training.members} {training.joining} {training.waiting}")
    if len(training.taken) > config.groups_per_step or (
        training.taken and training.state not in (StepState.OPEN, StepState.REDUCING)
    ):
        _fail("a step takes B groups", f"{len(training.taken)} in {training.state}")
    if config.max_staleness is not None:
        oldest = min((group.version for group in training.taken), default=state.steps_done)
        if state.steps_done - oldest > config.max_staleness:
            _fail("no group is staler than max_staleness", f"version {oldest} at step {state.steps_done}")
    known = Counter(m for group in training.taken for m in group.micro_steps)
    found = Counter(training.queue.waiting())
    found.update(entry.micro_step for _, entry in training.claims.values())
    found.update(entry.micro_step for entries in training.done.values() for entry in entries)
    if known != found:
        _fail("each micro-step is queued, claimed or done by a member, once", f"{known - found} missing, {found - known} extra")
    if training.state is StepState.REDUCING:
        if len(training.taken) != config.groups_per_step or training.claims or len(training.queue) or training.joining:
            _fail(
                "a step closes when all its micro-steps are done", f"{len(training.taken)} groups, {len(training.claims)} claims"
            )
        if CORE not in training.members:
            _fail("the core is a member", str(sorted(training.members)))
