"""The simulator and real processes, one scheduler: the same decisions, at the same prices.

A real run is simulated again with every answer at the time at which the real one came: all commands must be equal, in order,
and no real answer may come before the time that the simulator asks for it. Neither depends on how slow this machine is; how much
later than priced answers come is what `qwengyre bench elastic` measures.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.bench.paced_run import PacedSettings, make_plan, run_paced
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.workload import Workload
from qwengyre.telemetry.folder import RunFolder

WORKLOAD = Workload(
    steps=2,
    groups_per_step=2,
    executions_per_group=2,
    steps_per_burst=1,
    dispatch_depth=0.5,
    nodes=2,
    cell_nodes=1,
    slots_per_node=3,
    median_h=1,
    sigma_query=0,
    sigma_execution=0,
    overall_timeout_h=24,
    train_node_hours_per_step=3.374,
    train_share_by_duration=0,
    micro_steps_per_group=2,
    optimizer_s=1035,
    publish_s=2007,
    to_training_s=2084,
    to_rollout_s=890,
    move_stall_s=0,
)
HOURS_GN = np.array([[2.89, 1.14], [1.38, 1.68], [1.89, 2.64], [2.70, 1.09]])
FAST, SLOW = PacedSettings(seconds_per_hour=0.7, lead_s=0.1), PacedSettings(seconds_per_hour=2.0, lead_s=0.1)
CASES = {
    "elastic": (Setting(policy="elastic"), SLOW),
    "colocate": (Setting(policy="colocate"), FAST),
    "standalone": (Setting(policy="colocate-standalone", standalone_nodes=1), FAST),
}

ROUNDING_S = 2e-3
"""Scripts of executions are written in milliseconds."""


def told(commands: list[cmd.Command]) -> list[tuple]:
    """Commands without what only names them: tickets, and micro-steps, which both sides number their own way."""
    names = ("ticket", "micro_step")
    return [(type(c).__name__, *(v for name, v in msgspec.structs.asdict(c).items() if name not in names)) for c in commands]


def key_of(event: ev.Event) -> tuple[type, object]:
    """What names an event on both sides, as long as both were told the same before it."""
    subject = getattr(event, "ticket", None) or getattr(event, "group", None)
    return type(event), getattr(event, "execution", subject)


class Retimed(SimDriver):
    """A simulated run in real seconds, each answer at the time at which the real one came; never, if the run had ended by then."""

    def __init__(self, setting: Setting, durations: Durations, pace: PacedSettings, events: list[ev.Event]):
        prices = ("optimizer_s", "publish_s", "to_training_s", "to_rollout_s")
        workload = msgspec.structs.replace(WORKLOAD, **{name: pace.seconds(getattr(WORKLOAD, name)) for name in prices})
        scaled = (pace.seconds(1) * durations.unloaded_GN - pace.lead_s, pace.seconds(1) * durations.train_GN)
        super().__init__(workload, *build(WORKLOAD, setting), Durations(*scaled, WORKLOAD.micro_steps_per_group))
        self.real_at = {key_of(event): event.at for event in events}
        self.early: list[tuple[object, float, float]] = []
        """What really came before its price was paid: what, real time, priced time."""
        self.commands: list[cmd.Command] = []
        self._handle, self.scheduler.handle = self.scheduler.handle, self._hear

    def _hear(self, event: ev.Event) -> list[cmd.Command]:
        decided = self._handle(event)
        self.commands.extend(decided)
        return decided

    def _answer(self, event: ev.Event) -> None:
        super()._answer(msgspec.structs.replace(event, at=self._real(key_of(event), event.at)))

    def _schedule(self, at: float, execution: str, stamp: int) -> None:
        super()._schedule(self._real((ev.ExecutionEnded, execution), at), execution, stamp)

    def _real(self, key: tuple[type, object], priced_at: float) -> float:
        at = self.real_at.get(key, math.inf)
        if at < priced_at - ROUNDING_S:
            self.early.append((key, at, priced_at))
        return at


def real_run(folder: Path) -> tuple[list[ev.Event], list[cmd.Command]]:
    """What the controller was told and decided; a durable checkpoint is nobody's answer and decides nothing."""
    events, commands = [], []
    for _, record in read(RunFolder(folder).controller_journal, ControllerRecord):
        if isinstance(record, ev.Event) and not isinstance(record, ev.CheckpointSaved):
            events.append(record)
        elif isinstance(record, Decided):
            commands.extend(record.commands)
    return events, commands


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_real_processes_are_told_what_the_simulated_ones_are(case, tmp_path):
    setting, pace = CASES[case]
    durations = Durations(HOURS_GN * 3600, Durations.draw(WORKLOAD, 0).train_GN, WORKLOAD.micro_steps_per_group)
    config, pool = build(WORKLOAD, setting)
    paced = run_paced("twin", config, make_plan(WORKLOAD, durations, pool, pace), tmp_path / "twin")
    events, commands = real_run(paced.folder)
    retimed = Retimed(setting, durations, pace, events)
    retimed.run()
    assert told(retimed.commands) == told(commands)
    assert retimed.early == []
