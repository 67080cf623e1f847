"""The scheduler on a virtual clock: the same `Scheduler` as in a real run, each command priced with a duration.

Nothing is decided here. A command either changes when an execution ends, or is answered after the time that its work
takes; the answers are ordered by time, then by the order in which they were asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, Final

from qwengyre.core.ids import ExecutionId, MicroStepId, index_of
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.durations import Durations
from qwengyre.sim.meters import Meters
from qwengyre.sim.rivals import Toggle
from qwengyre.sim.servers import Independent, Servers, Shared
from qwengyre.sim.settings import Pool
from qwengyre.sim.workload import Workload

OVERALL_TIMEOUT: Final = -1
"""Stamp of the scheduled drop of an execution: it stands as long as the execution lives."""
NOBODY: Final = ExecutionId("")
"""In place of an execution, where an event is there already."""


class SimDriver:
    """One simulated run."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        pool: Pool,
        durations: Durations,
        *,
        is_recorded: bool = False,
        retune: Callable[[Scheduler, ev.Event, Sequence[cmd.Command]], ev.Retuned | None] | None = None,
    ):
        self.workload, self.pool = workload, pool
        self.scheduler = Scheduler(config, Toggle() if pool.pauses else None)
        self.durations = durations
        self.now = 0.0
        self._retune = retune
        """Sees every event with its commands, and may answer with a plan, which the scheduler hears at once."""
        self.num_events = 0
        self.meters = Meters(self.scheduler.state, workload, pool, is_recorded=is_recorded)
        self._unloaded_GN: Sequence[Sequence[float]] = durations.unloaded_GN.tolist()
        self._num_replicas = pool.num_replicas(workload)
        self._free_at = {cell.cell: [0.0] * self._num_replicas for cell in self.scheduler.state.cells.all}
        """When each replica of a cell has finished what it computes; heaps."""
        self._timeout_s = workload.overall_timeout_h * 3600
        self._answers: list[tuple[float, int, ev.Event | None, ExecutionId, int]] = []
        self._sequence = 0
        self._node_seconds: dict[MicroStepId, float] = {}
        self._dropped: dict[int, list[int]] = {}
        self._held_at: dict[ExecutionId, float] = {}
        self._paused_s: dict[ExecutionId, float] = {}
        """How long executions were held that the overall timeout has not allowed for yet."""
        self._left_s: dict[ExecutionId, float] = {}
        """What the overall timeout leaves of executions whose time would have been up while they are held."""
        self.servers: Servers = (
            Shared(self._schedule, workload, pool.nodes)
            if workload.decode_share and workload.slowdown > 1
            else Independent(self._schedule)
        )

    def run(self, check: Callable[[Scheduler], None] | None = None) -> Meters:
        """Simulate to the end; `check` sees the scheduler after every event. Returns what was measured."""
        self._send(ev.RunStarted(at=0.0))
        while self._answers and not self.scheduler.state.is_finished:
            at, _, event, execution, stamp = heapq.heappop(self._answers)
            if event is None:
                event = self._end_of(at, execution, stamp)
                if event is None:
                    continue
            self.now = at
            self._send(event)
            if check:
                check(self.scheduler)
        return self.meters

    def _send(self, event: ev.Event) -> None:
        self.num_events += 1
        self.meters.advance(event.at)
        commands = self.scheduler.handle(event)
        for command in commands:
            PRICES[type(command)](self, command)
        self.meters.observe(event.at)
        if self._retune is not None and (plan := self._retune(self.scheduler, event, commands)):
            self._send(plan)

    def _answer(self, event: ev.Event) -> None:
        self._sequence += 1
        heapq.heappush(self._answers, (event.at, self._sequence, event, NOBODY, 0))

    def _schedule(self, at: float, execution: ExecutionId, stamp: int) -> None:
        self._sequence += 1
        heapq.heappush(self._answers, (at, self._sequence, None, execution, stamp))

    def _end_of(self, at: float, execution: ExecutionId, stamp: int) -> ev.Event | None:
        """The event of a scheduled end that still stands."""
        live = self.scheduler.state.placement.live.get(execution)
        if live is None:
            return None
        if stamp == OVERALL_TIMEOUT:
            paused_s = self._paused_s.pop(execution, 0.0)
            if execution in self._held_at:
                self._left_s[execution] = paused_s + at - self._held_at[execution]
                return None
            if paused_s:
                self._schedule(at + paused_s, execution, OVERALL_TIMEOUT)
                return None
            self._dropped.setdefault(live.group, []).append(index_of(execution))
            self.meters.num_dropped += 1
        elif not self.servers.is_due(execution, stamp):
            return None
        self.servers.end(execution, at)
        self.meters.end(execution, live.group, at)
        return ev.ExecutionEnded(at, execution, live.attempt)

    # --------------------------------------------------------------------------------------------- prices of commands

    def _start(self, command: cmd.Start) -> None:
        group = self.scheduler.state.placement.live[command.execution].group
        unloaded_s = self._unloaded_GN[group][index_of(command.execution)]
        self.servers.start(command.execution, command.server, self.now, unloaded_s)
        self.meters.start(command.execution, self.now)
        if unloaded_s * self.workload.slowdown > self._timeout_s:
            self._schedule(self.now + self._timeout_s, command.execution, OVERALL_TIMEOUT)

    def _foresee(self) -> None:
        expected_G = self.durations.expected_G
        state, planned = self.scheduler.state, self.scheduler.planned
        if not planned.wants_foresight or expected_G is None:
            return
        first = state.num_train_groups
        seconds = tuple(expected_G[first : planned.num_groups_due(state.steps_done)].tolist())
        self._answer(ev.Foreseen(self.now, first, seconds))

    def _drain(self, command: cmd.Drain) -> None:
        for move in command.moves:
            self.servers.move(move.execution, move.server, self.now, self.workload.move_stall_s)
        self.meters.num_moves += len(command.moves)
        self._answer(ev.CellDrained(self.now, command.ticket, command.cell))

    def _route(self, command: cmd.Route) -> None:
        held_at = self._held_at.pop(command.execution, None)
        if command.execution in self._left_s:
            self._schedule(self.now + self._left_s.pop(command.execution), command.execution, OVERALL_TIMEOUT)
        elif held_at is not None:
            self._paused_s[command.execution] = self._paused_s.get(command.execution, 0.0) + self.now - held_at
        self.servers.move(command.execution, command.server, self.now, self.workload.move_stall_s)

    def _hold(self, command: cmd.Hold) -> None:
        """What is held does not grow older: a pause is no time that the execution had."""
        self._held_at[command.execution] = self.now
        self.servers.move(command.execution, None, self.now, 0.0)

    def _prepare_group(self, command: cmd.PrepareGroup) -> None:
        """A dropped execution is not trained; the others' work is cut into equal micro-steps."""
        group = command.group
        dropped = self._dropped.get(group, ())
        seconds = self.durations.micro_steps_s(group, dropped)
        names = tuple(MicroStepId(f"m{group:06d}-{i}") for i in range(len(seconds)))
        self._node_seconds.update(zip(names, seconds, strict=True))
        num_valid = self.workload.executions_per_group - len(dropped)
        self._answer(ev.GroupReady(self.now, group, names, num_valid))

    def _to_training(self, command: cmd.SwitchToTraining) -> None:
        self._answer(ev.CellInTraining(self.now + self.workload.to_training_s, command.ticket, command.cell))

    def _to_rollout(self, command: cmd.ReturnToRollout) -> None:
        self._answer(ev.CellInRollout(self.now + self.workload.to_rollout_s, command.ticket, command.cell))

    def _open_step(self, command: cmd.OpenStep) -> None:
        self._answer(ev.StepOpened(self.now, command.ticket))

    def _join_step(self, command: cmd.JoinStep) -> None:
        self._answer(ev.StepJoined(self.now, command.ticket, command.cell))

    def _take_group(self, command: cmd.TakeGroup) -> None:
        self.meters.take(command)

    def _compute(self, command: cmd.Compute) -> None:
        """One replica computes a whole micro-step. Its cell claims the next as soon as another replica is free."""
        num_members = len(self.scheduler.state.training.members) * self._num_replicas
        overhead = 1 + self.workload.replica_overhead * (num_members - 1)
        nodes = self.pool.cell_nodes / self._num_replicas
        seconds = self._node_seconds[command.micro_step] / nodes * overhead
        self.meters.compute_s += seconds / self._num_replicas
        free_at = self._free_at[command.cell]
        heapq.heapreplace(free_at, self.now + seconds)
        self.meters.idle.compute(self.now + seconds)
        self._answer(ev.MicroStepDone(max(self.now, free_at[0]), command.ticket, command.cell))

    def _close_step(self, command: cmd.CloseStep) -> None:
        """The reduction waits for every replica."""
        last = max(max(self._free_at[cell]) for cell in command.members)
        self._answer(ev.StepReduced(max(self.now, last), command.ticket))

    def _run_optimizer(self, command: cmd.RunOptimizer) -> None:
        self._answer(ev.StepDone(self.now + self.workload.optimizer_s, command.ticket))

    def _publish(self, command: cmd.Publish) -> None:
        """What is known of the groups that it will dispatch is said before."""
        self._foresee()
        self._answer(ev.Published(self.now + self.workload.publish_s, command.ticket))

    def _finish(self, command: cmd.FinishRun) -> None:
        self.meters.finished_at = self.now

    def _nothing(self, command: cmd.Command) -> None:
        """Costs no time and needs no answer."""


PRICES: Final[dict[type[cmd.Command], Callable[[SimDriver, Any], None]]] = {
    cmd.Dispatch: SimDriver._nothing,
    cmd.Start: SimDriver._start,
    cmd.Route: SimDriver._route,
    cmd.Hold: SimDriver._hold,
    cmd.PrepareGroup: SimDriver._prepare_group,
    cmd.Drain: SimDriver._drain,
    cmd.SwitchToTraining: SimDriver._to_training,
    cmd.ReturnToRollout: SimDriver._to_rollout,
    cmd.OpenStep: SimDriver._open_step,
    cmd.JoinStep: SimDriver._join_step,
    cmd.TakeGroup: SimDriver._take_group,
    cmd.Compute: SimDriver._compute,
    cmd.CloseStep: SimDriver._close_step,
    cmd.RunOptimizer: SimDriver._run_optimizer,
    cmd.Publish: SimDriver._publish,
    cmd.ReportEvaluation: SimDriver._nothing,
    cmd.Regroup: SimDriver._nothing,
    cmd.FinishRun: SimDriver._finish,
}
"""Each takes the command that it is filed under."""
