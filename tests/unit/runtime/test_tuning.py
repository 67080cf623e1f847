"""`scheduler.tune` in a run: plans come from a process of their own, and a resumed run hears those of its earlier lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from qwengyre.journal import Journal
from qwengyre.runtime import tuning
from qwengyre.runtime.records import ControllerRecord, Decided, RunOpened
from qwengyre.runtime.recovery import recover
from qwengyre.runtime.tuning import Tuning
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.results import Drawn
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.tuning import Replanned, Tuner, retuner
from tests.unit.sim.test_tuning import CAP, WORKLOAD

SHORT = msgspec.structs.replace(WORKLOAD, steps=6)


def journalled(path: Path) -> tuple[Path, SchedulerConfig, SimDriver]:
    """The controller's journal of a tuned run, by the simulator."""
    config, pool = build(SHORT, Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=CAP, tune=True))
    driver = SimDriver(SHORT, config, pool, Drawn(SHORT).durations(0), retune=retuner())
    with Journal.open(path, ControllerRecord) as journal:
        journal.append(RunOpened(life=0, at=0.0, wall_time="2026-11-30T12:00:00"))
        decide = driver.scheduler.handle

        def handle(event: ev.Event) -> list:
            commands = decide(event)
            journal.append(event)
            if commands:
                journal.append(Decided(tuple(commands)))
            return commands

        driver.scheduler.handle = handle
        driver.run()
    return path, config, driver


def test_a_resumed_run_decides_by_the_plans_of_its_earlier_lives(tmp_path: Path):
    path, config, driver = journalled(tmp_path / "controller.log")
    recovered = recover(path, config)
    assert recovered.scheduler.state.is_finished
    assert recovered.scheduler.config == driver.scheduler.config != config


def test_evidence_after_a_resume_is_that_of_a_run_that_never_stopped(tmp_path: Path):
    path, config, driver = journalled(tmp_path / "controller.log")
    seen = Tuner(recover(path, config).history).evidence(driver.scheduler.planned, 3, driver.now)
    live = Tuner()
    again = SimDriver(
        SHORT, config, build(SHORT, Setting(steps_per_burst=1, dispatch_depth=0.0))[1], Drawn(SHORT).durations(0),
        retune=(lambda tune: lambda scheduler, event, commands: (live.history.see(event, commands), tune(scheduler, event, commands))[1])(
            retuner()
        ),
    )  # fmt: skip
    again.run()
    assert seen == live.evidence(again.scheduler.planned, 3, again.now)


class Steps:
    """A scheduler that is fed a run up to the end of its first step, and what hears of it."""

    def __init__(self, adopt: list[Replanned]) -> None:
        self.tuning = Tuning(Tuner(), adopt.append)

    async def first_step(self) -> Scheduler:
        config, pool = build(SHORT, Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=CAP, tune=True))
        events: list[tuple[ev.Event, list]] = []

        def note(scheduler: Scheduler, event: ev.Event, commands: list) -> None:
            events.append((event, commands))

        SimDriver(SHORT, config, pool, Drawn(SHORT).durations(0), retune=note).run()
        scheduler = Scheduler(config)
        for event, commands in events:
            assert scheduler.handle(event) == commands
            self.tuning.see(event, commands, scheduler)
            if isinstance(event, ev.StepDone):
                break
        return scheduler


async def settle(tuning: Tuning) -> None:
    assert tuning._planning is not None
    await asyncio.gather(tuning._planning, return_exceptions=True)


async def test_a_plan_comes_from_a_process_of_its_own():
    adopted: list[Replanned] = []

    steps = Steps(adopted)
    await steps.first_step()
    await settle(steps.tuning)
    assert len(adopted) == 1 and adopted[0].dispatch_depth > 0


@pytest.mark.parametrize("module", ["qwengyre.sim.no_such_module", "json.tool"])
async def test_a_plan_that_fails_is_logged_and_the_run_goes_on(module: str, monkeypatch, caplog):
    adopted: list[Replanned] = []
    real = tuning.tethered
    monkeypatch.setattr(tuning, "tethered", lambda name, arguments: real(module, arguments))

    steps = Steps(adopted)
    await steps.first_step()
    await settle(steps.tuning)
    assert not adopted and "plan_failed" in caplog.text


async def test_a_run_that_ends_gives_up_its_plan():
    steps = Steps([])
    await steps.first_step()
    steps.tuning.stop()
    await settle(steps.tuning)
    assert steps.tuning._planning.cancelled()
