"""The simulator and real processes, one scheduler: the same decisions, burst by burst.

Events of this workload lie at least 0.2 h apart (0.4 s here), so that the cost of the control plane cannot change their order.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from qwengyre.bench.paced_run import PacedSettings, make_plan, run_paced
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.scheduler import commands as cmd
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

SWITCHES = (cmd.Drain, cmd.SwitchToTraining, cmd.JoinStep, cmd.ReturnToRollout)
STEPS = (cmd.OpenStep, cmd.TakeGroup, cmd.CloseStep, cmd.RunOptimizer, cmd.Publish, cmd.FinishRun)
ROLLOUT = (cmd.Dispatch, cmd.Start)


def told(commands: list[cmd.Command], kinds: tuple[type, ...]) -> list[tuple]:
    """Commands of some kinds in order, without the tickets that only number them."""
    return [
        (type(command).__name__, *(value for name, value in msgspec.structs.asdict(command).items() if name != "ticket"))
        for command in commands
        if isinstance(command, kinds)
    ]


def simulated(durations: Durations, setting: Setting) -> list[cmd.Command]:
    config, pool = build(WORKLOAD, setting)
    driver, commands = SimDriver(WORKLOAD, config, pool, durations), []
    handle = driver.scheduler.handle

    def heard(event):
        decided = handle(event)
        commands.extend(decided)
        return decided

    driver.scheduler.handle = heard
    driver.run()
    return commands


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_real_processes_are_told_what_the_simulated_ones_are(case, tmp_path):
    setting, pace = CASES[case]
    durations = Durations(HOURS_GN * 3600, Durations.draw(WORKLOAD, 0).train_GN, WORKLOAD.micro_steps_per_group)
    config, pool = build(WORKLOAD, setting)
    expected = simulated(durations, setting)
    paced = run_paced("twin", config, make_plan(WORKLOAD, durations, pool, pace), tmp_path / "twin")
    records = read(RunFolder(paced.folder).controller_journal, ControllerRecord)
    real = [command for _, record in records if isinstance(record, Decided) for command in record.commands]
    for kinds in (SWITCHES, STEPS, ROLLOUT):
        assert told(real, kinds) == told(expected, kinds)
    computed = {(command.cell, command.step): 0 for command in expected if isinstance(command, cmd.Compute)}
    for side, sign in ((expected, 1), (real, -1)):
        for command in side:
            if isinstance(command, cmd.Compute):
                computed[command.cell, command.step] += sign
    assert set(computed.values()) == {0}
