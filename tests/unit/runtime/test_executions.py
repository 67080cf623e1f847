"""Pure parts of running executions: the order of tasks, permuted rewards, ids."""

import asyncio

import msgspec

from qwengyre.core.arrays import FLAG, VERSION, pack
from qwengyre.core.ids import ExecutionId
from qwengyre.core.records import End, MicroStep, Outcome, Role, TrainingExecution, Trajectory, Validity
from qwengyre.runtime.controller import members_of
from qwengyre.runtime.executions import Executions, ExecutionSettings, GroupPlan, permuted
from qwengyre.runtime.observer import token_staleness
from qwengyre.runtime.queries import EvaluationPlan, TrainingOrder
from qwengyre.sandbox.task import Task
from qwengyre.testing.runtime import FakeGateway
from qwengyre.trajectory.harness_rules import BUILTIN


def test_every_task_comes_once_before_any_comes_again():
    order = TrainingOrder([f"t{i}" for i in range(7)], seed=3)
    for number in range(4):
        assert len({order.task(number * 7 + place) for place in range(7)}) == 7


def test_passes_are_shuffled_by_the_seed_and_differ():
    tasks = [f"t{i}" for i in range(20)]
    first, again, other = TrainingOrder(tasks, 1), TrainingOrder(tasks, 1), TrainingOrder(tasks, 2)
    assert [first.task(i) for i in range(40)] == [again.task(i) for i in range(40)]
    assert [first.task(i) for i in range(20)] != [other.task(i) for i in range(20)]
    assert [first.task(i) for i in range(20)] != [first.task(i) for i in range(20, 40)]


def test_an_evaluation_samples_every_task_and_then_takes_each_greedily():
    plan = EvaluationPlan(("a", "b"), samples=4, greedy=True, temperature=1.0)
    assert [plan.group(i) for i in range(4)] == [("a", 1.0), ("b", 1.0), ("a", 0.0), ("b", 0.0)]


def test_permuting_deals_the_same_scores_and_leaves_dropped_executions_alone(outcome):
    scores = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    outcomes = [msgspec.structs.replace(outcome, score=score) for score in scores]
    outcomes[2] = msgspec.structs.replace(outcomes[2], validity=Validity.DROPPED)
    dealt = permuted(outcomes, seed=5, group=1)
    assert sorted(one.score for one in dealt) == scores
    assert dealt[2] == outcomes[2]
    assert dealt != outcomes
    assert dealt == permuted(outcomes, seed=5, group=1)
    assert any(permuted(outcomes, seed=5, group=g) != dealt for g in range(2, 6))


def test_a_group_has_its_executions():
    plan = GroupPlan(12, "train", 0, "task", 1.0, 2)
    assert members_of(plan) == [ExecutionId("e000012-0"), ExecutionId("e000012-1")]


def test_token_staleness_counts_trained_tokens_only():
    trajectory = Trajectory(
        role=Role.MAIN,
        segments=(),
        token_ids_T=b"",
        trainable_T=pack([False, True, True, True], FLAG),
        logprob_T=b"",
        version_T=pack([-1, 3, 4, 5], VERSION),
    )
    execution = TrainingExecution(ExecutionId("e"), 0, 1.0, 1.0, (trajectory,), 3)
    assert token_staleness([MicroStep("m", 5, (execution,), 4)], step=5) == 1.0


async def test_no_more_harnesses_than_the_limit_run_at_once(outcome):
    """The others wait their turn; none is refused."""
    running, most = 0, 0

    class Launcher:
        async def run_execution(self, spec, num_calls):
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1
            return outcome

    task = Task("t", "/t", "do", 1.0, 1.0)
    settings = ExecutionSettings(seed=0, max_context_tokens=10, max_tokens_per_call=5)
    executions = Executions(FakeGateway(), Launcher(), {"t": task}, settings, BUILTIN, max_concurrent=2)
    plan = GroupPlan(0, "train", 0, "t", 1.0, 5)

    async def run_all():
        return await asyncio.gather(*(executions.run(plan, execution, 0, lambda: 0.0) for execution in members_of(plan)))

    done = await run_all()
    assert most == 2
    assert [one.execution for one in done] == members_of(plan)


async def test_of_two_routes_under_way_the_last_one_counts():
    """The first order is sent again and again while the gateway restarts; the second must not overtake it."""
    routed = []
    is_back = asyncio.Event()

    class Gateway(FakeGateway):
        async def open(self, order):
            routed.append(order.server)
            return await super().open(order)

        async def route(self, routes):
            if routes[execution] == "cell-1":
                await is_back.wait()
            routed.append(routes[execution])

    task = Task("t", "/t", "do", 1.0, 1.0)
    plan = GroupPlan(0, "train", 0, "t", 1.0, 1)
    (execution,) = members_of(plan)

    class Launcher:
        async def run_execution(self, spec, num_calls):
            orders = [asyncio.create_task(executions.route(execution, server)) for server in ("cell-1", "cell-2")]
            for _ in range(5):
                await asyncio.sleep(0)
            is_back.set()
            await asyncio.gather(*orders)
            return Outcome(End.EXITED, Validity.VALID, 0.5, "digest", 1.0)

    settings = ExecutionSettings(seed=0, max_context_tokens=10, max_tokens_per_call=5)
    executions = Executions(Gateway(), Launcher(), {"t": task}, settings, BUILTIN, max_concurrent=1)

    async def body():
        executions.routes[execution] = "cell-0"
        await executions.run(plan, execution, 0, lambda: 0.0)
        await executions.route(execution, "cell-1")

    await body()
    assert routed == ["cell-0", "cell-1", "cell-2"]
    assert executions.routes == {}


async def test_route_that_changes_while_an_execution_is_opened_is_told_afterwards(outcome):
    """It is opened with its route, in one order; only another route needs a second one."""
    routed = []

    class Gateway(FakeGateway):
        async def open(self, order):
            if order.execution == moved:
                await executions.route(moved, "cell-1")
            return await super().open(order)

        async def route(self, routes):
            routed.append(routes)

    class Launcher:
        async def run_execution(self, spec, num_calls):
            return outcome

    plan = GroupPlan(0, "train", 0, "t", 1.0, 2)
    moved, stays = members_of(plan)
    settings = ExecutionSettings(seed=0, max_context_tokens=10, max_tokens_per_call=5)
    task = Task("t", "/t", "do", 1.0, 1.0)
    executions = Executions(Gateway(), Launcher(), {"t": task}, settings, BUILTIN, max_concurrent=2)

    async def body():
        for execution in (moved, stays):
            executions.routes[execution] = "cell-0"
            await executions.run(plan, execution, 0, lambda: 0.0)

    await body()
    assert routed == [{moved: "cell-1"}]


async def test_nothing_is_kept_of_an_execution_that_is_to_be_dispatched_again():
    """Not its outcome, its route nor its tree: the gateway throws its calls away when the next attempt is opened."""

    class Gateway(FakeGateway):
        async def close_execution(self, execution):
            raise AssertionError("closed: the next attempt could not be opened")

    lost = Outcome(End.LOST, Validity.DROPPED, 0.0, "", 1.0, detail="the zygote died")

    class Launcher:
        async def run_execution(self, spec, num_calls):
            return lost

    settings = ExecutionSettings(seed=0, max_context_tokens=10, max_tokens_per_call=5)
    executions = Executions(Gateway(), Launcher(), {"t": Task("t", "/t", "do", 1.0, 1.0)}, settings, BUILTIN, max_concurrent=1)
    plan = GroupPlan(0, "train", 0, "t", 1.0, 1)
    (execution,) = members_of(plan)
    executions.routes[execution] = "cell-0"
    assert await executions.run(plan, execution, 0, lambda: 0.0) is lost
    assert (executions.routes, executions.outcomes, executions._trees) == ({}, {}, {})
