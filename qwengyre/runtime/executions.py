"""The rollout half of the driver: an execution from its key to its score, a group from its scores to its micro-steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from qwengyre.buffer.packing import pack_group
from qwengyre.core.ids import ExecutionId, GroupId, ServerId
from qwengyre.core.records import End, MicroStep, Outcome, Role, TrainingExecution, Validity
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.hooks.in_controller import ControllerHooks
from qwengyre.hooks.judge import GroupToJudge
from qwengyre.hooks.views import ScoredExecution, Transcript
from qwengyre.hooks.workspace import LeftWorkspace
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.runtime.records import CallCounts, ExecutionDone
from qwengyre.sandbox.harness import ExecutionSpec
from qwengyre.sandbox.launcher import Rewarded
from qwengyre.sandbox.task import Task
from qwengyre.trajectory.harness_rules import HarnessRules
from qwengyre.trajectory.process import FinishedExecution, Judgement, process_group
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.tree import TrajectoryTree

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig

log = logging.getLogger(__name__)
SUMMARIES = frozenset({Role.MAIN_SUMMARY, Role.SUB_AGENT_SUMMARY})


class GroupPlan(msgspec.Struct, frozen=True):
    """What a dispatched group runs."""

    group: GroupId
    kind: str
    version: int
    task: str
    temperature: float
    num_executions: int


class ExecutionSettings(msgspec.Struct, frozen=True):
    """What every execution is opened with."""

    seed: int
    max_context_tokens: int
    max_tokens_per_call: int
    model: str = "policy"


class RunsExecutions(Protocol):
    """A `Launcher` in this process, or `HarnessHosts`."""

    async def run_execution(
        self, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]], rewarded: Rewarded | None = None
    ) -> Outcome: ...


class Executions:
    """Runs executions, and keeps what finished ones said until their group has been prepared."""

    def __init__(
        self,
        gateway: GatewayClient,
        launcher: RunsExecutions,
        tasks: Mapping[str, Task],
        settings: ExecutionSettings,
        rules: Sequence[HarnessRules],
        *,
        max_concurrent: int,
    ) -> None:
        """At most `max_concurrent` harnesses run at once; the others wait, dispatched, in the order of their start."""
        self._gateway, self._launcher, self._tasks = gateway, launcher, tasks
        self._settings, self._rules = settings, rules
        self.routes: dict[ExecutionId, ServerId | None] = {}
        """Where each live execution is to be served; None holds its calls."""
        self.outcomes: dict[ExecutionId, Outcome] = {}
        """Of executions whose group is not prepared yet."""
        self._trees: dict[ExecutionId, TrajectoryTree] = {}
        self._open: set[ExecutionId] = set()
        self._untold: set[ExecutionId] = set()
        """Whose route the gateway has to hear."""
        self._telling: dict[int, asyncio.Lock] = {}
        """By gateway: one that is being started again holds up no other."""
        self._room = asyncio.Semaphore(max_concurrent)
        self.hooks: ControllerHooks | None = None

    async def run(
        self, plan: GroupPlan, execution: ExecutionId, attempt: int, at: Callable[[], float]
    ) -> ExecutionDone | Outcome:
        """Open it at the gateway, run its harness, close it, score its workspace. An Outcome (of End.LOST) is all that is left of one
        that is to be dispatched again: the gateway throws its calls away when the next attempt is opened."""
        async with self._room:
            return await self._run(plan, execution, attempt, at)

    async def _run(
        self, plan: GroupPlan, execution: ExecutionId, attempt: int, at: Callable[[], float]
    ) -> ExecutionDone | Outcome:
        order = self._order(plan, execution, attempt)
        opened = await self._gateway.open(order)
        self._open.add(execution)
        if self.routes.get(execution) != order.server:
            await self.send_routes([execution])
        spec = ExecutionSpec(
            execution=execution,
            task=self._tasks[plan.task],
            key=opened.key,
            base_path=opened.path.removesuffix("/v1"),
            model=self._settings.model,
            attempt=attempt,
            gateway=self._gateway.number_of(execution),
        )

        async def close() -> int:
            return len((await self.tree(execution)).calls)

        try:
            if self.hooks is not None and self.hooks.makes_reward(plan.kind):
                outcome = await self._launcher.run_execution(spec, close, self._rewarded(plan, spec))
            else:
                outcome = await self._launcher.run_execution(spec, close)
        finally:
            self._open.discard(execution)
            self.routes.pop(execution, None)
        if outcome.end is End.LOST:
            return outcome
        self.outcomes[execution] = outcome
        counts = self._count(await self.tree(execution))
        return ExecutionDone(execution, plan.group, attempt, plan.task, plan.temperature, outcome, counts, at())

    def _rewarded(self, plan: GroupPlan, spec: ExecutionSpec) -> Rewarded:
        """The reward hook, with all that it is told. Raises HookFailed."""
        hooks, execution, began = self.hooks, ExecutionId(spec.execution), time.monotonic()
        assert hooks is not None

        async def rewarded(workspace: Path, outcome: Outcome) -> Outcome:
            tree = await self.tree(execution)
            scored = ScoredExecution(
                execution=execution,
                attempt=spec.attempt,
                task=spec.task.name,
                task_folder=spec.task.folder,
                instruction=spec.task.instruction,
                kind="train" if plan.kind == "train" else "evaluation",
                score=outcome.score,
                reward_range=spec.task.reward_range,
                end=outcome.end,
                duration_s=time.monotonic() - began,
                workspace=LeftWorkspace(workspace),
                transcript=Transcript(tree, assign_roles(tree.calls, self._rules), hooks.decode),
            )
            return await hooks.reward(scored, outcome)

        return rewarded

    def _order(self, plan: GroupPlan, execution: ExecutionId, attempt: int) -> OpenExecution:
        return OpenExecution(
            execution=execution,
            attempt=attempt,
            seed=self._settings.seed,
            temperature=plan.temperature,
            trainable=plan.kind == "train",
            max_context_tokens=self._settings.max_context_tokens,
            max_tokens_per_call=self._settings.max_tokens_per_call,
            model=self._settings.model,
            server=self.routes.get(execution),
        )

    async def route(self, execution: ExecutionId, server: ServerId | None) -> None:
        """Send the execution's calls, held ones first, to `server`; None holds them. The last word counts; none after its end."""
        if execution in self.routes:
            self.routes[execution] = server
            await self.send_routes([execution])

    async def send_routes(self, executions: Iterable[ExecutionId]) -> None:
        """Say again where these go: one of them may have been opened while its move was under way."""
        self._untold.update(executions)
        first, *others = {self._gateway.number_of(execution) for execution in self._untold} or {0}
        if not others:
            await self._tell(first)
            return
        async with asyncio.TaskGroup() as telling:
            for gateway in (first, *others):
                telling.create_task(self._tell(gateway), name=f"tell gateway {gateway}")

    async def _tell(self, gateway: int) -> None:
        """One order at a time to each gateway: of two that are under way together the older might come last, and count."""
        async with self._telling.setdefault(gateway, asyncio.Lock()):
            its = {execution for execution in self._untold if self._gateway.number_of(execution) == gateway}
            self._untold -= its
            if known := {execution: self.routes.get(execution) for execution in its if execution in self._open}:
                await self._gateway.route(known)

    async def send_routes_of(self, gateway: int) -> None:
        """After gateway number `gateway` came back."""
        await self.send_routes([execution for execution in self._open if self._gateway.number_of(execution) == gateway])

    async def tree(self, execution: ExecutionId) -> TrajectoryTree:
        """What a finished execution said; asking closes it, and its key is dead from then on."""
        if execution not in self._trees:
            closed = await self._gateway.close_execution(execution)
            self._trees[execution] = await asyncio.to_thread(TrajectoryTree.build, closed.opened, closed.records)
        return self._trees[execution]

    def _count(self, tree: TrajectoryTree) -> CallCounts:
        roles = assign_roles(tree.calls, self._rules)
        return CallCounts(
            calls=len(tree.calls),
            tokens_sampled=sum(call.finished.num_sampled for call in tree.calls.values() if call.finished),
            tokens_distinct=tree.num_distinct_tokens,
            compactions=sum(role in SUMMARIES for role in roles.values()),
            sub_agents=sum(roles[call_id] is Role.SUB_AGENT and call.base is None for call_id, call in tree.calls.items()),
            calls_moved=sum(call.finished.num_moves for call in tree.calls.values() if call.finished),
        )

    async def judge(self, plan: GroupPlan, executions: Sequence[ExecutionId], config: RunConfig) -> Judgement | None:
        """What hooks say of a group whose executions have all ended; None without such hooks. Raises HookFailed."""
        if self.hooks is None or not self.hooks.judges_groups:
            return None
        finished = await self._finished(plan.group, executions, config)
        return await self.hooks.judge(GroupToJudge(plan.group, plan.task, plan.version, tuple(finished)))

    async def _finished(self, group: GroupId, executions: Sequence[ExecutionId], config: RunConfig) -> list[FinishedExecution]:
        outcomes = [self.outcomes[execution] for execution in executions]
        if config.runtime.permute_rewards:
            outcomes = permuted(outcomes, self._settings.seed, group)
        return [
            FinishedExecution(execution, await self.tree(execution), outcome)
            for execution, outcome in zip(executions, outcomes, strict=True)
        ]

    async def prepare(
        self, group: GroupId, executions: Sequence[ExecutionId], config: RunConfig, judgement: Judgement | None = None
    ) -> tuple[list[TrainingExecution], list[MicroStep]]:
        """Advantages, chosen trajectories and micro-steps of a group whose executions have all ended."""
        finished = await self._finished(group, executions, config)
        processed = await asyncio.to_thread(
            process_group,
            group,
            finished,
            config.trajectory,
            seed=self._settings.seed,
            rules=self._rules,
            judgement=judgement,
        )
        for execution in executions:
            del self._trees[execution], self.outcomes[execution]
        return processed, pack_group(processed, -1, config.trajectory, config.trainer.max_row_tokens)

    def forget(self, executions: Sequence[ExecutionId]) -> None:
        """An evaluation is reported: nothing of it is trained."""
        for execution in executions:
            self._trees.pop(execution, None)
            self.outcomes.pop(execution, None)


def permuted(outcomes: Sequence[Outcome], seed: int, group: GroupId) -> list[Outcome]:
    """Scores dealt anew among the valid executions of a group: the control in which nothing can be learned."""
    valid = [i for i, outcome in enumerate(outcomes) if outcome.validity is Validity.VALID]
    order = np.random.default_rng((seed, group)).permutation(len(valid))
    dealt = list(outcomes)
    for place, source in zip(valid, order, strict=True):
        dealt[place] = msgspec.structs.replace(outcomes[place], score=outcomes[valid[source]].score)
    return dealt
