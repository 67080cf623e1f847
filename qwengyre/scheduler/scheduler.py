"""The scheduler: `handle(event) -> list[AnyCommand]`, the only place where anything is decided.

Each event changes the state through one handler; then `_settle` applies the rules, in a fixed order, to what is now true.
The runtime, the simulator and the replay of a journal drive this same class, so equal events give byte-equal commands.
The cost of an event grows with the logarithm of the number of servers and groups, never with the number of executions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from qwengyre.core.errors import IllegalTransition
from qwengyre.core.ids import CORE, GroupId, execution_id, standalone_server
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import Cell, CellState
from qwengyre.scheduler.commands import (
    AnyCommand,
    AnyTicketed,
    CloseStep,
    Compute,
    Dispatch,
    Drain,
    FinishRun,
    JoinStep,
    OpenStep,
    PrepareGroup,
    Publish,
    Regroup,
    ReportEvaluation,
    ReturnToRollout,
    RunOptimizer,
    SwitchToTraining,
    TakeGroup,
)
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.placement import STANDALONE_RANK
from qwengyre.scheduler.policies import POLICIES, Policy
from qwengyre.scheduler.state import State
from qwengyre.scheduler.training import CoreLost, StepState
from qwengyre.scheduler.validate import Invariants

Out = list[AnyCommand]


class Scheduler:
    """A pure state machine over `State`.

    >>> scheduler = Scheduler(SchedulerConfig(num_cells=2, slots_per_cell=8, steps=1, groups_per_step=1, executions_per_group=2))
    >>> [type(command).__name__ for command in scheduler.handle(ev.RunStarted(at=0.0))]
    ['Regroup', 'Dispatch', 'Start', 'Start']
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None):
        self.state = State(config)
        self.policy = policy or POLICIES[config.policy]()
        self._invariants = Invariants()
        self._next_ticket = 1

    @property
    def config(self) -> SchedulerConfig:
        """What it decides by now: the config of the run, with the last plan that was adopted."""
        return self.state.config

    @property
    def planned(self) -> SchedulerConfig:
        """What it will decide by after the next publish, as far as it was told."""
        return self.state.plan or self.state.config

    def handle(self, event: ev.Event) -> Out:
        """Take one event; return the commands to start, in this order.

        Raises IllegalTransition for an event that cannot happen now: a fault of the driver.
        """
        out: Out = []
        HANDLERS[type(event)](self, event, out)
        self._settle(out)
        return out

    def validate(self) -> None:
        """Check every invariant of docs/scheduler.md; call it after each event. Raises InvariantViolated. O(everything)."""
        self._invariants.check(self.state, self.policy)

    def awaited(self) -> list[AnyCommand]:
        """Commands without an answer yet, in the order of their start: what a restarted driver has to start again or fail."""
        preparing = [PrepareGroup(group) for group in self.state.groups.unprepared()]
        return [*preparing, *self.state.awaited.values()]

    # ------------------------------------------------------------------ rules, in the order in which they are applied

    def _settle(self, out: Out) -> None:
        state = self.state
        if state.version < 0 or state.is_finished:
            return
        if state.must_publish and state.training.state is StepState.NONE and state.cells.core.state is not CellState.LOST:
            self._publish(out)
        if state.training.state is StepState.NONE and state.cells.core.state is CellState.TRAINING:
            self._open_step(out)
        if state.training.state is StepState.OPEN:
            self._work(out)
        if leavers := self.policy.leavers(state):
            self._leave(leavers, out)
        if state.placement.queue or state.placement.held:
            state.placement.place(out)
        if state.steps_done == state.version == self.config.steps and state.waterlevel == 0:
            state.is_finished = True
            out.append(FinishRun(state.steps_done))

    def _publish(self, out: Out) -> None:
        training = self.state.training
        training.ticket = self._ticket()
        self._start(Publish(training.ticket, self.state.steps_done), out)
        training.advance(out[-1])

    def _open_step(self, out: Out) -> None:
        """Streaming opens as soon as the core can, so that snapshots are out before the data; else a whole step is ready."""
        state = self.state
        if state.num_steps_to_open <= 0 or not (state.config.streams or state.has_data):
            return
        state.training.ticket = self._ticket()
        self._start(OpenStep(state.training.ticket, state.steps_done), out)
        state.training.advance(out[-1])

    def _work(self, out: Out) -> None:
        """Join who waits, hand out claims, and close the step when nothing is left of it."""
        state, training = self.state, self.state.training
        if training.waiting and (len(training.queue) or len(training.taken) < self.config.groups_per_step):
            self._join_waiting(out)
        while (cell := training.next_idle()) is not None:
            while not len(training.queue) and state.may_take:
                self._take_group(out)
            if not len(training.queue):
                break
            ticket = self._ticket()
            entry = training.claim(cell, ticket)
            self._start(Compute(ticket, cell, state.steps_done, entry.micro_step), out)
        is_whole = len(training.taken) == self.config.groups_per_step
        if is_whole and not (len(training.queue) or training.claims or training.joining):
            training.ticket = self._ticket()
            members = tuple(sorted(training.members, key=training.members.__getitem__))
            self._start(CloseStep(training.ticket, state.steps_done, state.epoch, members), out)
            training.advance(out[-1])

    def _join_waiting(self, out: Out) -> None:
        training = self.state.training
        for cell, rank in sorted(training.waiting.items(), key=lambda item: item[1]):
            ticket = self._ticket()
            training.joining[cell] = ticket, rank
            self._start(JoinStep(ticket, cell, self.state.steps_done), out)
        training.waiting.clear()

    def _take_group(self, out: Out) -> None:
        group = self.state.groups.take()
        self.state.training.take(group)
        step = self.state.steps_done
        out.append(TakeGroup(group.group, step, step - group.version))

    def _leave(self, leavers: Iterable[Cell], out: Out) -> None:
        leavers = list(leavers)
        moves = self.state.placement.hand_over([cell.server for cell in leavers], out if self.policy.pauses else None)
        for cell in leavers:
            cell.ticket = self._ticket()
            self._start(Drain(cell.ticket, cell.cell, moves[cell.server]), out)
            self.state.cells.advance(cell, out[-1])
            self.state.cells.prefix.append(cell)

    # ------------------------------------------------------------------------------------------ executions and groups

    def _on_run_started(self, event: ev.RunStarted, out: Out) -> None:
        state = self.state
        if state.version >= 0:
            raise IllegalTransition("the run", "started", event)
        for cell in state.cells.all:
            if cell.state is not CellState.LOST:
                self._serve(cell)
        for index, is_alive in enumerate(state.standalone_alive):
            if is_alive:
                self._serve_standalone(index)
        out.append(Regroup(state.epoch, state.cells.order()))
        self._dispatch(0, out)

    def _dispatch(self, version: int, out: Out) -> None:
        """Make `version` the published one, evaluate it if it is due, and dispatch training groups up to its depth."""
        state, before = self.state, self.state.version
        state.begin_burst(version)
        config = state.config
        is_due = _is_evaluation_due(config, before, version)
        if is_due:
            groups = [self._dispatch_group("evaluation", size, out) for size in config.evaluation_group_sizes]
            state.evaluations[version] = groups
            state.evaluation_left[version] = len(groups)
        self._dispatch_training(out)

    def _dispatch_training(self, out: Out) -> None:
        state, config, before = self.state, self.state.config, self.state.num_train_groups
        while state.num_train_groups < config.num_groups_due(state.version):
            self._dispatch_group("train", config.executions_per_group, out)
            state.num_train_groups += 1
        state.order_newest(state.num_train_groups - before)

    def _dispatch_group(self, kind: Literal["train", "evaluation"], num: int, out: Out) -> GroupId:
        state = self.state
        group = state.next_group
        state.groups.dispatch(group, kind, version=state.version, num_executions=num)
        out.append(Dispatch(group, kind, state.version, num))
        for index in range(num):
            state.placement.add(execution_id(group, index), group)
        state.next_group = GroupId(group + 1)
        state.num_dispatched += num
        return group

    def _on_execution_ended(self, event: ev.ExecutionEnded, out: Out) -> None:
        state = self.state
        live = state.placement.end(event.execution, event.attempt)
        if live is None:
            return
        state.num_ended += 1
        group = state.groups.end_execution(live.group)
        if group.num_left:
            return
        if group.kind == "train":
            out.append(PrepareGroup(group.group))
            return
        state.groups.forget(group.group)
        state.evaluation_left[group.version] -= 1
        if not state.evaluation_left[group.version]:
            out.append(ReportEvaluation(group.version, tuple(state.evaluations[group.version])))

    def _on_execution_lost(self, event: ev.ExecutionLost, out: Out) -> None:
        self.state.placement.restart(event.execution, event.attempt)

    def _on_group_ready(self, event: ev.GroupReady, out: Out) -> None:
        self.state.groups.set_ready(event.group, event.micro_steps, num_valid=event.num_valid)

    # ---------------------------------------------------------------------------------------------------------- roles

    def _on_cell_drained(self, event: ev.CellDrained, out: Out) -> None:
        cell = self.state.cells.all[event.cell]
        if self._is_awaited(event.ticket):
            self.state.cells.advance(cell, event)
            cell.ticket = self._ticket()
            self._start(SwitchToTraining(cell.ticket, cell.cell), out)

    def _on_cell_in_training(self, event: ev.CellInTraining, out: Out) -> None:
        cell = self.state.cells.all[event.cell]
        if not self._is_awaited(event.ticket):
            return
        self.state.cells.advance(cell, event)
        if cell.is_turning:
            self._return(cell, out)
        elif cell.cell != CORE:
            self.state.training.waiting[cell.cell] = cell.rank

    def _on_cell_in_rollout(self, event: ev.CellInRollout, out: Out) -> None:
        cell = self.state.cells.all[event.cell]
        if self._is_awaited(event.ticket):
            self.state.cells.advance(cell, event)
            self._serve(cell)

    def _serve(self, cell: Cell) -> None:
        if self.policy.serves(self.state, cell):
            self.state.placement.open(cell.server, self.config.slots_per_cell, cell.rank)

    def _send_back(self, num_kept: int, out: Out) -> None:
        """Return the prefix beyond its first `num_kept` cells; who is in transit turns round on arrival."""
        prefix = self.state.cells.prefix
        for cell in prefix[num_kept:]:
            if cell.state is CellState.TRAINING:
                self._return(cell, out)
            else:
                cell.is_turning = True
        del prefix[num_kept:]

    def _return(self, cell: Cell, out: Out) -> None:
        cell.is_turning = False
        self.state.training.waiting.pop(cell.cell, None)
        cell.ticket = self._ticket()
        self._start(ReturnToRollout(cell.ticket, cell.cell, self.state.version), out)
        self.state.cells.advance(cell, out[-1])

    # ---------------------------------------------------------------------------------------------------------- steps

    def _on_step_opened(self, event: ev.StepOpened, out: Out) -> None:
        training = self.state.training
        if not self._is_awaited(event.ticket):
            return
        training.advance(event)
        training.join(CORE, self.state.cells.core.rank)
        if not self.config.streams:
            while len(training.taken) < self.config.groups_per_step:
                self._take_group(out)

    def _on_step_joined(self, event: ev.StepJoined, out: Out) -> None:
        if self._is_awaited(event.ticket):
            self.state.training.join(event.cell, self.state.cells.all[event.cell].rank)

    def _on_micro_step_done(self, event: ev.MicroStepDone, out: Out) -> None:
        if self._is_awaited(event.ticket):
            self.state.training.finish(event.cell)

    def _on_step_reduced(self, event: ev.StepReduced, out: Out) -> None:
        state, training = self.state, self.state.training
        if not self._is_awaited(event.ticket):
            return
        training.advance(event)
        num_executions = training.num_executions
        state.consumed[state.steps_done] = training.clear()
        training.ticket = self._ticket()
        self._start(RunOptimizer(training.ticket, state.steps_done, num_executions), out)

    def _on_step_done(self, event: ev.StepDone, out: Out) -> None:
        if self._is_awaited(event.ticket):
            self.state.training.advance(event)
            self.state.steps_done += 1
            self.state.shorten_burst()

    def _on_retuned(self, event: ev.Retuned, out: Out) -> None:
        if not self.config.tune:
            raise IllegalTransition("a run without tune", "as configured", event)
        self.state.plan = msgspec.structs.replace(self.config, **event.plan())

    def _on_foreseen(self, event: ev.Foreseen, out: Out) -> None:
        self.state.expected = dict(enumerate(event.seconds, start=event.first))

    def _on_reconfigured(self, event: ev.Reconfigured, out: Out) -> None:
        """A longer run whose last version is published goes on with a burst of its own; a burst under way ends where it was to end."""
        state, changes = self.state, event.changes()
        if state.version < 0:
            raise IllegalTransition("the run", "not started", event)
        if reason := self.cannot_change(changes):
            raise ValueError(reason)
        state.reconfigure(changes)
        if state.version == state.burst_end == state.steps_done < self.config.steps:
            state.is_finished = False
            state.begin_burst(state.version)
            self._dispatch_training(out)
            self._send_back(self.policy.num_kept(state), out)

    def cannot_change(self, changes: Mapping[str, int | float | bool]) -> str:
        """Why a run that stands here cannot go on with these fields of `Reconfigured`; empty: it can."""
        state, steps = self.state, int(changes.get("steps", self.config.steps))
        if (steps > 0) != (self.config.steps > 0):
            return "an evaluation does not become a training run, nor a training run an evaluation: start another run"
        least = max(state.burst_end, -(-state.num_train_groups // self.config.groups_per_step))
        if steps < least:
            return f"steps = {steps} is too few: groups of {least} steps are dispatched already, so at least {least}"
        try:
            msgspec.structs.replace(self.planned, **changes)
        except ValueError as error:
            return str(error)
        return ""

    def _on_checkpoint_saved(self, event: ev.CheckpointSaved, out: Out) -> None:
        self._forget_consumed(event.step)

    def _forget_consumed(self, durable_step: int) -> None:
        state = self.state
        state.durable_step = max(state.durable_step, durable_step)
        for step in [step for step in state.consumed if step < min(state.durable_step, state.steps_done)]:
            del state.consumed[step]

    def _on_published(self, event: ev.Published, out: Out) -> None:
        state = self.state
        if not self._is_awaited(event.ticket):
            return
        state.training.advance(event)
        self._forget_consumed(state.steps_done)
        self._dispatch(state.steps_done, out)
        self._send_back(self.policy.num_kept(state), out)

    # --------------------------------------------------------------------------------------------------------- losses

    def _on_cell_lost(self, event: ev.CellLost, out: Out) -> None:
        state = self.state
        cell = state.cells.all[event.cell]
        self._stop_awaiting_cell(cell)
        state.cells.lose(cell, event)
        state.epoch += 1
        out.append(Regroup(state.epoch, state.cells.order()))
        state.placement.lose(cell.server, out)
        if cell.cell == CORE:
            self._lose_core(out)
            return
        was_member = cell.cell in state.training.members
        state.training.lose(cell.cell)
        if was_member and state.training.state is StepState.REDUCING:
            self._stop_awaiting(state.training.ticket)
            state.training.advance(event)

    def _lose_core(self, out: Out) -> None:
        """Abandon the open step; what its optimizer may already have made durable is decided when the core is back."""
        state, training = self.state, self.state.training
        self._stop_awaiting(training.ticket)
        for ticket in [ticket for ticket, _ in (*training.joining.values(), *training.claims.values())]:
            self._stop_awaiting(ticket)
        training.advance(CoreLost())
        for group in training.clear():
            state.groups.put_back(group)
        if self.config.traits.switches:
            self._send_back(0, out)

    def _on_cell_returned(self, event: ev.CellReturned, out: Out) -> None:
        state = self.state
        cell = state.cells.all[event.cell]
        state.cells.restore(cell, event)
        state.epoch += 1
        out.append(Regroup(state.epoch, state.cells.order()))
        if cell.cell == CORE:
            self._restore_core(event)
        self._serve(cell)

    def _restore_core(self, event: ev.CellReturned) -> None:
        """Go back to the checkpoint's step: the groups of all later steps are ready again."""
        state = self.state
        newest = max(state.steps_done, state.durable_step, *(step + 1 for step in state.consumed))
        if event.step is None or not state.durable_step <= event.step <= newest:
            raise ValueError(
                f"the core came back at step {event.step}, but step {state.durable_step} is durable and {newest} is the last: "
                "restore it from the last durable checkpoint"
            )
        state.steps_done = event.step
        for step in [step for step in state.consumed if step >= event.step]:
            for group in state.consumed.pop(step):
                state.groups.put_back(group)

    def _on_standalone_lost(self, event: ev.StandaloneLost, out: Out) -> None:
        self.state.standalone_alive[event.index] = False
        self.state.placement.lose(standalone_server(event.index), out)

    def _on_standalone_returned(self, event: ev.StandaloneReturned, out: Out) -> None:
        self.state.standalone_alive[event.index] = True
        self._serve_standalone(event.index)

    def _serve_standalone(self, index: int) -> None:
        self.state.placement.open(standalone_server(index), self.config.slots_per_standalone, STANDALONE_RANK + index)

    # -------------------------------------------------------------------------------------------------------- tickets

    def _ticket(self) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        return ticket

    def _start(self, command: AnyTicketed, out: Out) -> None:
        self.state.awaited[command.ticket] = command
        out.append(command)

    def _is_awaited(self, ticket: int) -> bool:
        """Take an answer once; False if its cell or step was lost meanwhile."""
        return self.state.awaited.pop(ticket, None) is not None

    def _stop_awaiting(self, ticket: int) -> None:
        self.state.awaited.pop(ticket, None)

    def _stop_awaiting_cell(self, cell: Cell) -> None:
        training = self.state.training
        self._stop_awaiting(cell.ticket)
        for table in (training.joining, training.claims):
            if cell.cell in table:
                self._stop_awaiting(table[cell.cell][0])


def _is_evaluation_due(config: SchedulerConfig, before: int, version: int) -> bool:
    """Whether publishing `version` after `before` calls for an evaluation (at the start: before = -1)."""
    if before < 0:
        return config.evaluate_at_start
    if version == config.steps:
        return config.evaluate_at_end
    every = config.evaluation_every_steps
    return every > 0 and version // every > before // every


HANDLERS: Final[dict[type[ev.Event], Callable[[Scheduler, Any, Out], None]]] = {
    ev.RunStarted: Scheduler._on_run_started,
    ev.ExecutionEnded: Scheduler._on_execution_ended,
    ev.ExecutionLost: Scheduler._on_execution_lost,
    ev.GroupReady: Scheduler._on_group_ready,
    ev.CellDrained: Scheduler._on_cell_drained,
    ev.CellInTraining: Scheduler._on_cell_in_training,
    ev.CellInRollout: Scheduler._on_cell_in_rollout,
    ev.StepOpened: Scheduler._on_step_opened,
    ev.StepJoined: Scheduler._on_step_joined,
    ev.MicroStepDone: Scheduler._on_micro_step_done,
    ev.StepReduced: Scheduler._on_step_reduced,
    ev.StepDone: Scheduler._on_step_done,
    ev.CheckpointSaved: Scheduler._on_checkpoint_saved,
    ev.Published: Scheduler._on_published,
    ev.Retuned: Scheduler._on_retuned,
    ev.Foreseen: Scheduler._on_foreseen,
    ev.Reconfigured: Scheduler._on_reconfigured,
    ev.CellLost: Scheduler._on_cell_lost,
    ev.CellReturned: Scheduler._on_cell_returned,
    ev.StandaloneLost: Scheduler._on_standalone_lost,
    ev.StandaloneReturned: Scheduler._on_standalone_returned,
}
"""Each takes the event that it is filed under."""
