"""The controller: one handler for every command of the scheduler (the table in scheduler/commands.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from qwengyre.core.errors import CellFailed, NoRoom, ProcessFailed, StaleRead
from qwengyre.core.ids import CORE, ExecutionId, GroupId, MicroStepId, cell_server, execution_id, group_of
from qwengyre.core.records import MicroStep, Outcome
from qwengyre.hooks.callbacks import ExecutionOver, WeightsPublished
from qwengyre.journal import Journal
from qwengyre.runtime.driver import Driver, Handler, RunClock
from qwengyre.runtime.executions import Executions, GroupPlan
from qwengyre.runtime.fleet import Fleet
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.runtime.give_up import Losses, Patience
from qwengyre.runtime.observer import Observer
from qwengyre.runtime.queries import EvaluationPlan, TrainingOrder
from qwengyre.runtime.records import ExecutionDone, GroupJudged, RoleSwitched
from qwengyre.runtime.sourcing import Sourcing
from qwengyre.runtime.steps import Steps
from qwengyre.runtime.tuning import Tuning
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.foresight import foresee
from qwengyre.sim.history import History
from qwengyre.sim.tuning import Replanned, Tuner
from qwengyre.trajectory.process import Judgement

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What a controller drives; `runtime/train.py` puts it together."""

    scheduler: Scheduler
    journal: Journal
    trained: Journal
    """The micro-steps that each step trained, for the audit."""
    clock: RunClock
    fleet: Fleet
    gateway: GatewayClient
    executions: Executions
    steps: Steps
    observer: Observer
    order: TrainingOrder
    evaluation: EvaluationPlan
    history: History
    """What earlier lives of the run showed."""
    sourcing: Sourcing | None = None
    """Chooses the tasks of training groups, in place of `order`."""
    judged: dict[GroupId, Judgement] = field(default_factory=dict)
    """What hooks said of groups in earlier lives."""


class Controller:
    """Carries out commands and posts their answers. Holds no rule about when anything should happen."""

    def __init__(self, config: RunConfig, parts: RunParts) -> None:
        self.config = config
        self.fleet, self.gateway = parts.fleet, parts.gateway
        self.executions, self.steps, self.observer = parts.executions, parts.steps, parts.observer
        self._order, self._evaluation, self._trained = parts.order, parts.evaluation, parts.trained
        self.plans: dict[GroupId, GroupPlan] = {}
        self.pending: list[cmd.AnyCommand] = []
        """Commands of an earlier life that have no answer yet."""
        self.done: dict[ExecutionId, ExecutionDone] = {}
        self._taken: dict[int, list[cmd.TakeGroup]] = {}
        self._computed: dict[int, list[MicroStep]] = {}
        self._cut: dict[GroupId, tuple[MicroStepId, ...]] = {}
        """Micro-steps of each group that no durable step has consumed."""
        self._consumed: dict[int, list[GroupId]] = {}
        self._restarts: asyncio.TaskGroup | None = None
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._lost_before: list[int] = []
        """Lost before the run drove anything."""
        self._known_lost: set[int] = set()
        """The scheduler hears of a loss once, however many new lives end on their way."""
        self._losses = Losses()
        self._harnesses_lost_at = -1.0
        self._drain_s: dict[int, float] = {}
        """How long the calls of a leaving cell took to move away."""
        self._num_dispatched = {"train": 0, "evaluation": 0}
        self._history = parts.history
        self._tuning = Tuning(Tuner(parts.history), self._adopt_plan) if config.scheduler.tune else None
        self._judged = parts.judged
        self.sourcing = parts.sourcing
        self._planned: dict[GroupId, asyncio.Event] = {}
        """Groups whose task a source chooses: set once it is known."""
        self._patience = Patience(config.runtime.give_up_after)
        self.driver = Driver(parts.scheduler, parts.journal, parts.clock, self._handlers(), self._on_decided)
        self.fleet.on_lost = self._on_cell_lost
        self.fleet.say = self.observer.say

    def _handlers(self) -> dict[type, Handler]:
        return {
            cmd.Dispatch: self.dispatch,
            cmd.Start: self.start,
            cmd.Route: self.route,
            cmd.Hold: self.hold,
            cmd.PrepareGroup: self.prepare_group,
            cmd.Drain: self.drain,
            cmd.SwitchToTraining: self.switch_to_training,
            cmd.ReturnToRollout: self.return_to_rollout,
            cmd.OpenStep: self.open_step,
            cmd.JoinStep: self.join_step,
            cmd.TakeGroup: self.take_group,
            cmd.Compute: self.compute,
            cmd.CloseStep: self.close_step,
            cmd.RunOptimizer: self.run_optimizer,
            cmd.Publish: self.publish,
            cmd.ReportEvaluation: self.report_evaluation,
            cmd.Regroup: self.regroup,
            cmd.FinishRun: self.finish_run,
        }

    def post(self, kind: type[ev.Event], **fields: object) -> None:
        self.driver.post(kind, **fields)

    def _on_decided(self, event: ev.Event, commands: list[cmd.AnyCommand]) -> None:
        scheduler = self.driver.scheduler
        self.observer.see(event, commands, scheduler)
        if self._tuning is not None:
            self._tuning.see(event, commands, scheduler)
        elif scheduler.config.wants_foresight:
            self._history.see(event, commands)
        if scheduler.planned.wants_foresight and any(isinstance(command, cmd.Publish) for command in commands):
            first, end = scheduler.state.num_train_groups, scheduler.planned.num_groups_due(scheduler.state.steps_done)
            self.post(ev.Foreseen, first=first, seconds=foresee(self._history, self._order.task, range(first, end)))

    def _adopt_plan(self, plan: Replanned) -> None:
        self.observer.see_plan(plan)
        self.post(ev.Retuned, **msgspec.structs.asdict(plan))

    # ------------------------------------------------------------------ executions

    def dispatch(self, command: cmd.Dispatch) -> Coroutine[None, None, None] | None:
        """The plan of a group. What a task source has to say of it is awaited by the executions of the group."""
        if command.kind == "train" and self.sourcing is not None:
            self._planned[command.group] = asyncio.Event()
            return self._dispatch_sourced(command, self.sourcing)
        index = self._num_dispatched[command.kind]
        self._num_dispatched[command.kind] += 1
        if command.kind == "train":
            task, temperature = self._order.task(index), self._evaluation.temperature
        else:
            task, temperature = self._evaluation.group(index % len(self._evaluation.group_sizes()))
        self._plan(command, task, temperature)
        return None

    def _plan(self, command: cmd.Dispatch, task: str, temperature: float) -> None:
        self.plans[command.group] = GroupPlan(
            command.group, command.kind, command.version, task, temperature, command.num_executions
        )

    async def _dispatch_sourced(self, command: cmd.Dispatch, sourcing: Sourcing) -> None:
        self._plan(command, await sourcing.task_of(command.group), self._evaluation.temperature)
        self._planned[command.group].set()

    def see_ended(self, group: GroupId) -> None:
        """Tell the task source of a training group whose executions have all ended."""
        if self.sourcing is not None:
            plan = self.plans[group]
            self.sourcing.see(group, plan.version, [self.done[execution] for execution in members_of(plan)])

    async def start(self, command: cmd.Start) -> None:
        execution = command.execution
        if (planned := self._planned.get(group_of(execution))) is not None:
            await planned.wait()
        plan = self.plans[group_of(execution)]
        self.executions.routes[execution] = command.server
        began = self.driver.clock.now()
        done = await self.executions.run(plan, execution, command.attempt, self.driver.clock.now)
        if isinstance(done, Outcome):
            self._see_lost(began, done)
            self.post(ev.ExecutionLost, execution=execution, attempt=command.attempt)
            return
        self.done[execution] = done
        self.driver.journal.append(done)
        self.observer.see_execution(done)
        self.observer.tell("on_execution", execution_over(plan, done))
        self._patience.see(done.outcome)
        self.post(ev.ExecutionEnded, execution=execution, attempt=command.attempt)

    def _see_lost(self, began: float, outcome: Outcome) -> None:
        """Harnesses that ran when one process died are lost together: they count as one loss. Raises ProcessGaveUp at one too many."""
        log.warning("execution_lost", extra={"reason": outcome.detail})
        if began > self._harnesses_lost_at:
            self._harnesses_lost_at = self.driver.clock.now()
            self._losses.see("a process that harnesses need", self._harnesses_lost_at, f"it said last: {outcome.detail}")

    async def route(self, command: cmd.Route) -> None:
        await self.executions.route(command.execution, command.server)

    async def hold(self, command: cmd.Hold) -> None:
        await self.executions.route(command.execution, None)

    async def prepare_group(self, command: cmd.PrepareGroup) -> None:
        self.see_ended(command.group)
        num_valid, ids = await self.cut_micro_steps(command.group)
        self.post(ev.GroupReady, group=command.group, micro_steps=ids, num_valid=num_valid)

    async def cut_micro_steps(self, group: GroupId) -> tuple[int, tuple[MicroStepId, ...]]:
        """Valid executions of a group whose executions have all ended, and its micro-steps, ready to be claimed."""
        plan = self.plans[group]
        judgement = self._judged.get(group)
        if judgement is None:
            judgement = await self.executions.judge(plan, members_of(plan), self.config)
            if judgement is not None:
                self.driver.journal.append(GroupJudged(group, judgement))
        processed, micro_steps = await self.executions.prepare(group, members_of(plan), self.config, judgement)
        ids = tuple(micro_step.micro_step for micro_step in micro_steps)
        self.steps.micro_steps.update(zip(ids, micro_steps, strict=True))
        self._cut[group] = ids
        return len(processed), ids

    def report_evaluation(self, command: cmd.ReportEvaluation) -> None:
        plans = [self.plans[group] for group in command.groups]
        done = {plan.group: [self.done[execution] for execution in members_of(plan)] for plan in plans}
        self.observer.see_evaluation(command.version, plans, done)
        for plan in plans:
            self.executions.forget(members_of(plan))

    # ------------------------------------------------------------------ role switches

    async def drain(self, command: cmd.Drain) -> None:
        moves = {move.execution: move.server for move in command.moves}
        self.executions.routes.update({e: s for e, s in moves.items() if e in self.executions.routes})
        began = self.driver.clock.now()
        moved = await self.gateway.move(cell_server(command.cell), moves)
        log.info("cell_drained", extra={"cell": command.cell, "num_moves": len(moves), **msgspec.to_builtins(moved)})
        await self.executions.send_routes(moves)
        self._drain_s[command.cell] = self.driver.clock.now() - began
        self.post(ev.CellDrained, ticket=command.ticket, cell=command.cell)

    async def switch_to_training(self, command: cmd.SwitchToTraining) -> None:
        drained = {"drain": self._drain_s.pop(command.cell, 0.0)}
        job = self.steps.enter_training(command.cell)
        if await self._unless_lost(self._switch(command.cell, "training", job, drained)):
            self.post(ev.CellInTraining, ticket=command.ticket, cell=command.cell)

    async def return_to_rollout(self, command: cmd.ReturnToRollout) -> None:
        job = self.steps.enter_rollout(command.cell, command.version)
        if await self._unless_lost(self._switch(command.cell, "rollout", job, {})):
            self.post(ev.CellInRollout, ticket=command.ticket, cell=command.cell)

    async def _switch(
        self, cell: int, role: Literal["training", "rollout"], job: Awaitable[dict[str, float]], before: dict[str, float]
    ) -> None:
        """Journal how long each phase took, those `before` included. A switch that broke off is journalled with its reason."""
        began = self.driver.clock.now()
        try:
            phases_s = before | await job
        except CellFailed as error:
            self.driver.journal.append(RoleSwitched(cell, role, before, self.driver.clock.now(), error.reason))
            raise
        self.driver.journal.append(RoleSwitched(cell, role, phases_s, self.driver.clock.now()))
        self.observer.see_switch(cell, self.driver.clock.now() - began)

    async def _unless_lost(self, job: Awaitable[None]) -> bool:
        """False when the cell died over it: the fleet has said so, and the scheduler goes by that."""
        try:
            await job
        except CellFailed as error:
            log.warning("command_died_with_its_cell", extra={"cell": error.cell, "reason": error.reason})
            return False
        return True

    # ------------------------------------------------------------------ steps

    async def open_step(self, command: cmd.OpenStep) -> None:
        self._taken[command.step], self._computed[command.step] = [], []
        if await self._unless_lost(self.steps.open_step(command.step)):
            self.post(ev.StepOpened, ticket=command.ticket)

    async def join_step(self, command: cmd.JoinStep) -> None:
        try:
            joined = await self._unless_lost(self.steps.join_step(command.cell, command.step))
        except StaleRead:
            log.info("joined_a_step_that_is_gone", extra={"cell": command.cell, "step": command.step})
            return
        if joined:
            self.post(ev.StepJoined, ticket=command.ticket, cell=command.cell)

    def take_group(self, command: cmd.TakeGroup) -> None:
        self._taken[command.step].append(command)

    async def compute(self, command: cmd.Compute) -> None:
        micro_step, computed = self.steps.micro_steps[command.micro_step], self._computed[command.step]

        async def run() -> None:
            stats = await self.steps.compute(command)
            if stats is not None:
                self.observer.see_micro_step(command.cell, stats)

        if await self._unless_lost(run()):
            computed.append(micro_step)  # of a step that was given up meanwhile, to a list that nobody reads
            self.post(ev.MicroStepDone, ticket=command.ticket, cell=command.cell)

    async def close_step(self, command: cmd.CloseStep) -> None:
        if await self._unless_lost(self.steps.close_step(command.step, command.members)):
            self.observer.see_members(command.step, command.members)
            self.post(ev.StepReduced, ticket=command.ticket)

    async def run_optimizer(self, command: cmd.RunOptimizer) -> None:
        step = command.step

        async def run() -> None:
            applied = await self.steps.apply(step, command.num_executions)
            micro_steps, taken = self._trained_micro_steps(step), self._taken.pop(step)
            self._consumed[step] = [group.group for group in taken]
            self.observer.see_step(applied, self.steps.stats.pop(step), taken, micro_steps, self._done_in(taken))
            for micro_step in micro_steps:
                self._trained.append(msgspec.structs.replace(micro_step, step=step))
            if (step + 1) % self.config.trainer.checkpoint_every == 0:
                await self._checkpoint(step + 1)

        if await self._unless_lost(run()):
            self.post(ev.StepDone, ticket=command.ticket)

    async def _checkpoint(self, step: int) -> None:
        await self.steps.checkpoint(step, self.driver.journal.position)
        for consumed in [consumed for consumed in self._consumed if consumed < step]:
            for group in self._consumed.pop(consumed):
                for micro_step in self._cut.pop(group):
                    del self.steps.micro_steps[micro_step]
        self.post(ev.CheckpointSaved, step=step)

    def _trained_micro_steps(self, step: int) -> list[MicroStep]:
        """Each once, though a lost cell may have had some of them computed twice."""
        return list({micro_step.micro_step: micro_step for micro_step in self._computed.pop(step)}.values())

    def _done_in(self, taken: Sequence[cmd.TakeGroup]) -> list[ExecutionDone]:
        return [self.done[execution] for group in taken for execution in members_of(self.plans[group.group])]

    async def publish(self, command: cmd.Publish) -> None:
        async def run() -> None:
            if self.steps.checkpoint_step < command.version:
                await self._checkpoint(command.version)
            await self.steps.publish(command.version)
            self.observer.tell("on_publish", WeightsPublished(self.driver.clock.now(), command.version))

        if await self._unless_lost(run()):
            self.post(ev.Published, ticket=command.ticket)

    def regroup(self, command: cmd.Regroup) -> None:
        self.steps.regroup(command.order)

    def finish_run(self, command: cmd.FinishRun) -> None:
        log.info("run_finished", extra={"steps": command.steps})

    # ------------------------------------------------------------------ losses

    def _on_cell_lost(self, cell: int) -> None:
        """`cell` also numbers the standalone engines, after the cells."""
        self.observer.say(f"{self.fleet.server(cell)} is lost; its calls go elsewhere, its micro-steps are claimed again")
        if cell not in self._known_lost:
            self._known_lost.add(cell)
            self._tell_of_loss(cell)
        if self._restarts is None:
            self._lost_before.append(cell)
        else:
            self._restarting[cell] = self._restarts.create_task(self._replace(cell), name=f"restart cell {cell}")

    def _tell_of_loss(self, cell: int) -> None:
        standalone = cell - self.config.scheduler.num_cells
        if standalone < 0:
            self.post(ev.CellLost, cell=cell)
        else:
            self.post(ev.StandaloneLost, index=standalone)

    async def _replace(self, cell: int) -> None:
        """Raises CellFailed for the core when it may not come back, and for a cell that does not stay."""
        server = self.fleet.server(cell)
        await self.gateway.remove_server(server)
        if not self.config.runtime.restart_lost_cells:
            if cell == CORE:
                raise CellFailed(cell, "is lost and restart_lost_cells is off: go on with --resume")
            return
        self._losses.see(server, self.driver.clock.now())
        while not await self._comes_back(cell):
            log.warning("cell_not_back", extra={"cell": cell})

    async def _comes_back(self, cell: int) -> bool:
        """False: to be tried again. A new life that is lost on its way is seen as any loss is, and replaced by that."""
        try:
            await self._unless_lost(self.restart_cell(cell))
        except NoRoom as error:
            if cell == CORE:
                raise CellFailed(cell, f"{error} Go on with --resume once there is room") from error
            self.observer.say(f"{error} The run continues without it until there is room")
            return False
        except ProcessFailed as error:
            log.warning("cell_not_started", extra={"cell": cell, "reason": str(error)})
            self._losses.see(self.fleet.server(cell), self.driver.clock.now(), str(error))
            return False
        return True

    async def restart_cell(self, cell: int) -> None:
        """A new process in the rollout role, with the published weights; the core with its last durable state."""
        await self.fleet.start(cell)
        step = await self.steps.restore_core() if cell == CORE else None
        await self.steps.bring_published(cell)
        self._known_lost.discard(cell)
        standalone = cell - self.config.scheduler.num_cells
        if standalone < 0:
            self.post(ev.CellReturned, cell=cell, step=step)
        else:
            self.post(ev.StandaloneReturned, index=standalone)

    async def gateway_restarted(self, gateway: int) -> None:
        self.observer.say(f"gateway {gateway} is back; clients that were cut off retry and continue")
        await self.fleet.tell_gateway(gateway)
        await self.executions.send_routes_of(gateway)

    async def run(self, restart: Sequence[int] = ()) -> None:
        """Until the run is finished. `restart` are cells that the scheduler knows to be lost: the core first, then the others."""
        self._known_lost.update(restart)
        async with asyncio.TaskGroup() as self._restarts:
            if restart:
                self._restarts.create_task(self._restart_all(restart), name="restart all cells")
            for cell in self._lost_before:
                self._restarting[cell] = self._restarts.create_task(self._replace(cell), name=f"restart cell {cell}")
            try:
                await self.driver.run(self.pending)
            finally:
                self._restarts = None
                if self._tuning is not None:
                    self._tuning.stop()
            for cell, restarting in self._restarting.items():
                if cell != CORE:
                    restarting.cancel()

    async def _restart_all(self, cells: Sequence[int]) -> None:
        await self._unless_lost(self.restart_cell(CORE))
        await asyncio.gather(*(self._unless_lost(self.restart_cell(cell)) for cell in cells if cell != CORE))


def members_of(plan: GroupPlan) -> list[ExecutionId]:
    return [execution_id(plan.group, index) for index in range(plan.num_executions)]


def execution_over(plan: GroupPlan, done: ExecutionDone) -> ExecutionOver:
    """What callbacks hear of it."""
    outcome = done.outcome
    return ExecutionOver(
        at=done.at,
        execution=done.execution,
        group=done.group,
        kind=plan.kind,
        task=done.task,
        reward=outcome.score,
        task_score=outcome.score if outcome.task_score is None else outcome.task_score,
        validity=outcome.validity.value,
        end=outcome.end.value,
        num_calls=done.counts.calls,
        num_tokens_sampled=done.counts.tokens_sampled,
        duration_s=outcome.duration_s,
    )
