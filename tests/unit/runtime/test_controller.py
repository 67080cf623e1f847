"""The driver's half of losses, on a real scheduler with cells that are fakes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from qwengyre.core.errors import CellFailed, ProcessGaveUp
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.runtime import controller as runtime
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.driver import RunClock
from qwengyre.runtime.give_up import MAX_LOSSES
from qwengyre.runtime.queries import EvaluationPlan, TrainingOrder
from qwengyre.runtime.records import Decided, ExecutionDone
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.history import History
from qwengyre.testing.runtime import FakeFleet, FakeGateway
from qwengyre.trainer.config import TrainerConfig

SCHEDULER = SchedulerConfig(num_cells=2, num_standalone=1, slots_per_cell=2, steps=1, groups_per_step=1, executions_per_group=2)


class Journal(list):
    position = 0


class Steps:
    """Cells lose their next `dying` lives before they have their weights."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet, self.dying = fleet, 0
        self.is_back = asyncio.Event()
        self.micro_steps = {"m0": "micro-step"}
        self.answer = asyncio.Event()

    async def bring_published(self, cell: int) -> None:
        if self.dying:
            self.dying -= 1
            self.fleet.on_lost(cell)
            raise CellFailed(cell, "died")
        self.is_back.set()

    async def open_step(self, step: int) -> None: ...

    async def compute(self, command: cmd.Compute) -> None:
        await self.answer.wait()

    def regroup(self, order: tuple[int, ...]) -> None: ...


LOST = Outcome(End.LOST, Validity.DROPPED, 0.0, "", 1.0, detail="the zygote died")


class Executions:
    def __init__(self) -> None:
        self.routes: dict[str, str | None] = {}
        self.num_lost = 0
        """So many attempts of each execution die with a process of ours."""

    async def run(self, plan: object, execution: str, attempt: int, at: object) -> Outcome:
        if attempt < self.num_lost:
            await asyncio.sleep(0)
            return LOST
        return await asyncio.Event().wait()

    async def route(self, execution: str, server: str | None) -> None: ...


def controller() -> runtime.Controller:
    fleet = FakeFleet(SCHEDULER.num_cells, SCHEDULER.num_standalone)
    config = SimpleNamespace(scheduler=SCHEDULER, runtime=RuntimeConfig(), trainer=TrainerConfig())
    observer = SimpleNamespace(see=lambda *_: None, say=lambda line: None, see_micro_step=lambda *_: None, tell=lambda *_: None)
    parts = runtime.RunParts(
        scheduler=Scheduler(SCHEDULER),
        journal=Journal(),
        trained=Journal(),
        clock=RunClock(),
        fleet=fleet,
        gateway=FakeGateway(),
        executions=Executions(),
        steps=Steps(fleet),
        observer=observer,
        order=TrainingOrder(["task"], seed=0),
        evaluation=EvaluationPlan(("task",), samples=1, greedy=False, temperature=1.0),
        history=History(),
    )
    return runtime.Controller(config, parts)


async def until_told(made: runtime.Controller, running: asyncio.Task) -> None:
    """Until the scheduler has heard everything, or the run is over."""
    while not (running.done() or made.driver._events.empty()):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cell", [1, 2], ids=["satellite", "standalone"])
async def test_a_cell_whose_new_lives_die_on_their_way_is_lost_once_and_comes_back_in_the_end(cell):
    made = controller()
    made.steps.dying = 3
    made.post(ev.RunStarted)
    running = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    made.fleet.on_lost(cell)
    await asyncio.wait({running, asyncio.create_task(made.steps.is_back.wait())}, return_when=asyncio.FIRST_COMPLETED)
    await until_told(made, running)
    assert not running.done(), running.exception()
    events = [record for record in made.driver.journal if isinstance(record, ev.Event)]
    assert [type(event) for event in events] in (
        [ev.RunStarted, ev.CellLost, ev.CellReturned],
        [ev.RunStarted, ev.StandaloneLost, ev.StandaloneReturned],
    )
    assert made.fleet.started == [cell] * 4
    assert all(cell.state is CellState.ROLLOUT for cell in made.driver.scheduler.state.cells.all)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_cell_that_never_comes_back_ends_the_run():
    made = controller()
    made.steps.dying = MAX_LOSSES
    made.post(ev.RunStarted)
    running = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    made.fleet.on_lost(1)
    with pytest.RaisesGroup(ProcessGaveUp, allow_unwrapped=False):
        await running
    assert len(made.fleet.started) == MAX_LOSSES - 1


async def test_a_micro_step_whose_step_was_given_up_and_done_again_meanwhile_counts_nowhere():
    """The core died, came back, and did the step without the cell that was still computing."""

    made = controller()
    await made.open_step(cmd.OpenStep(1, 0))
    computing = asyncio.create_task(made.compute(cmd.Compute(2, 1, 0, "m0")))
    await asyncio.sleep(0)
    await made.open_step(cmd.OpenStep(3, 0))
    made.steps.answer.set()
    await computing
    assert made._trained_micro_steps(0) == []
    made.steps.answer.clear()
    await made.open_step(cmd.OpenStep(4, 0))
    computing = asyncio.create_task(made.compute(cmd.Compute(5, 1, 0, "m0")))
    await asyncio.sleep(0)
    del made.steps.micro_steps["m0"], made._computed[0]
    made.steps.answer.set()
    await computing


def starts_of(made: runtime.Controller) -> list[tuple[str, int]]:
    decided = [record.commands for record in made.driver.journal if isinstance(record, Decided)]
    return [(one.execution, one.attempt) for commands in decided for one in commands if isinstance(one, cmd.Start)]


async def test_executions_whose_harness_was_lost_are_dispatched_again_and_not_journalled():
    async def body():
        made = controller()
        made.executions.num_lost = 1
        made.post(ev.RunStarted)
        running = asyncio.create_task(made.run())
        while len(starts_of(made)) < 2 * SCHEDULER.executions_per_group:
            assert not running.done(), running.exception()
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return made

    made = await body()
    assert sorted(starts_of(made)) == [(execution, attempt) for execution in ("e000000-0", "e000000-1") for attempt in (0, 1)]
    assert made.done == {} and not [record for record in made.driver.journal if isinstance(record, ExecutionDone)]


async def test_what_is_lost_again_and_again_ends_the_run_and_harnesses_lost_together_count_once():
    async def body():
        made = controller()
        made.executions.num_lost = MAX_LOSSES
        made.post(ev.RunStarted)
        with pytest.RaisesGroup(pytest.RaisesExc(ProcessGaveUp, match="the zygote died"), flatten_subgroups=True):
            await made.run()
        return max(attempt for _, attempt in starts_of(made))

    assert await body() == MAX_LOSSES - 1
