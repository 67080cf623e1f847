"""The driver journals what it hands to the scheduler, in that order, and starts every command."""

import asyncio
import itertools

import pytest

from qwengyre.core.errors import JournalCorrupt
from qwengyre.journal import Journal, read
from qwengyre.runtime.driver import Driver, RunClock
from qwengyre.runtime.records import ControllerRecord, Decided, ExecutionDone
from qwengyre.runtime.recovery import recover
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler

CONFIG = SchedulerConfig(num_cells=2, slots_per_cell=2, steps=1, groups_per_step=1, executions_per_group=2, steps_per_burst=1)


def answering(driver_of, answers):
    """Handlers that answer every command at once, from a table of command -> list of (event, fields)."""

    def handler(command):
        for kind, fields in answers.get(type(command), lambda _: [])(command):
            driver_of().post(kind, **fields)

    return {kind: handler for kind in cmd.AnyCommand.__args__}


def ticketed(kind, *names):
    return lambda command: [(kind, {"ticket": command.ticket, **{name: getattr(command, name) for name in names}})]


ANSWERS = {
    cmd.Start: lambda c: [(ev.ExecutionEnded, {"execution": c.execution, "attempt": c.attempt})],
    cmd.PrepareGroup: lambda c: [(ev.GroupReady, {"group": c.group, "micro_steps": ("m0",), "num_valid": 2})],
    cmd.Drain: ticketed(ev.CellDrained, "cell"),
    cmd.SwitchToTraining: ticketed(ev.CellInTraining, "cell"),
    cmd.ReturnToRollout: ticketed(ev.CellInRollout, "cell"),
    cmd.OpenStep: ticketed(ev.StepOpened),
    cmd.JoinStep: ticketed(ev.StepJoined, "cell"),
    cmd.Compute: ticketed(ev.MicroStepDone, "cell"),
    cmd.CloseStep: ticketed(ev.StepReduced),
    cmd.RunOptimizer: ticketed(ev.StepDone),
    cmd.Publish: ticketed(ev.Published),
}


async def run(path):
    with Journal.open(path, ControllerRecord) as journal:
        drivers = []
        handlers = answering(lambda: drivers[0], ANSWERS)
        drivers.append(Driver(Scheduler(CONFIG), journal, RunClock(), handlers))
        drivers[0].post(ev.RunStarted)
        await drivers[0].run()
    return [record for _, record in read(path, ControllerRecord)]


async def test_a_run_ends_and_its_journal_holds_every_event_before_its_commands(tmp_path):
    records = await run(tmp_path / "controller.log")
    assert isinstance(records[0], ev.RunStarted)
    assert isinstance(records[1], Decided)
    assert isinstance(records[-1], Decided) and isinstance(records[-1].commands[-1], cmd.FinishRun)
    assert all(isinstance(before, ev.Event) for before, after in itertools.pairwise(records) if isinstance(after, Decided))


async def test_recovery_replays_to_the_same_scheduler(tmp_path):
    await run(tmp_path / "controller.log")
    recovered = recover(tmp_path / "controller.log", CONFIG)
    assert recovered.scheduler.state.is_finished
    assert recovered.scheduler.state.steps_done == 1
    assert [dispatch.group for dispatch in recovered.dispatches] == [0]
    assert recovered.taken == {0: 0}


async def test_recovery_refuses_a_journal_of_other_decisions(tmp_path):
    await run(tmp_path / "controller.log")
    other = SchedulerConfig(num_cells=3, slots_per_cell=2, steps=1, groups_per_step=1, executions_per_group=2, steps_per_burst=1)
    with pytest.raises(JournalCorrupt, match="decides differently"):
        recover(tmp_path / "controller.log", other)


def test_a_stop_loses_cells_and_live_executions_but_not_those_whose_end_is_journalled(tmp_path, outcome):
    path = tmp_path / "controller.log"
    scheduler = Scheduler(CONFIG)
    started = ev.RunStarted(at=1.0)
    with Journal.open(path, ControllerRecord) as journal:
        commands = scheduler.handle(started)
        journal.append(started)
        journal.append(Decided(tuple(commands)))
        first, second = [command.execution for command in commands if isinstance(command, cmd.Start)]
        journal.append(ExecutionDone(first, 0, 0, "task", 1.0, outcome, counts(), 2.0))
    events = recover(path, CONFIG).events_of_the_stop()
    assert [event.cell for event in events if isinstance(event, ev.CellLost)] == [0, 1]
    assert [event.execution for event in events if isinstance(event, ev.ExecutionEnded)] == [first]
    assert [event.execution for event in events if isinstance(event, ev.ExecutionLost)] == [second]


def counts():
    from qwengyre.runtime.records import CallCounts

    return CallCounts()


async def test_the_first_failing_command_ends_the_run_with_its_error(tmp_path):
    async def fail():
        raise JournalCorrupt("x", offset=0, reason="broken on purpose")

    handlers = {kind: (lambda command: fail()) for kind in cmd.AnyCommand.__args__}
    with Journal.open(tmp_path / "controller.log", ControllerRecord) as journal:
        driver = Driver(Scheduler(CONFIG), journal, RunClock(), handlers)
        driver.post(ev.RunStarted)
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(driver.run(), 30)
    assert raised.group_contains(JournalCorrupt, match="broken on purpose")
