"""A run's journal as the source of durations: a simulated run, journalled, is simulated again from its journal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.journal import Journal
from qwengyre.runtime.measured import measured_source
from qwengyre.runtime.records import ControllerRecord, Decided, RunOpened
from qwengyre.scheduler.events import Event
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.results import SimulationJob, run_job
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.workload import Workload, builtin_workloads
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.records import BranchCause, CallFinished, CallStarted, GatewayRecord, Opened, RoleHints

WORKLOAD = msgspec.structs.replace(
    builtin_workloads()["nl122_v1"],
    steps=6,
    groups_per_step=4,
    executions_per_group=4,
    nodes=4,
    cell_nodes=1,
    slots_per_node=16.0,
    train_share_by_duration=0.9,
    move_stall_s=0.0,
    to_training_s=2.0,
    to_rollout_s=3.0,
)


def journalled_run(path: Path, workload: Workload = WORKLOAD) -> tuple[RunFolder, float]:
    """A run folder as the controller leaves it, and the hours that the run took."""
    config, pool = build(workload, Setting())
    table = {**msgspec.to_builtins(config), "streaming": None, "max_staleness": None}
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items() if value is not None]
    folder = RunFolder(path)
    folder.journal.mkdir(parents=True)
    folder.config.write_text("[scheduler]\n" + "\n".join(lines))
    driver = SimDriver(workload, config, pool, Durations.draw(workload, 5))
    with Journal.open(folder.controller_journal, ControllerRecord) as journal:
        journal.append(RunOpened(life=0, at=0.0, wall_time="2026-11-29T12:00:00"))
        decide = driver.scheduler.handle

        def handle(event: Event) -> list:
            commands = decide(event)
            journal.append(event)
            journal.append(Decided(tuple(commands)))
            return commands

        driver.scheduler.handle = handle
        meters = driver.run()
    return folder, meters.hours


def test_run_simulated_from_its_own_journal_takes_the_same_time(tmp_path: Path):
    folder, hours = journalled_run(tmp_path)
    source = measured_source(folder)
    assert len(source.groups) == WORKLOAD.num_groups
    assert run_job(SimulationJob(source, Setting(), 0)).hours == pytest.approx(hours, rel=1e-6)


def test_prices_of_switches_and_steps_are_those_of_the_run(tmp_path: Path):
    workload = measured_source(journalled_run(tmp_path)[0]).workload
    assert (workload.to_training_s, workload.to_rollout_s) == (pytest.approx(2.0), pytest.approx(3.0))
    assert (workload.optimizer_s, workload.publish_s) == (pytest.approx(10.0), pytest.approx(60.0))
    assert workload.micro_steps_per_group == WORKLOAD.micro_steps_per_group


def test_other_seeds_draw_groups_of_the_run_again(tmp_path: Path):
    source = measured_source(journalled_run(tmp_path)[0])
    drawn = source.durations(1).unloaded_GN
    known = {group.durations_s for group in source.groups}
    assert all(tuple(row) in known for row in drawn) and len({tuple(row) for row in drawn}) < len(known)


def test_held_time_of_calls_is_taken_out_and_moves_are_priced_by_it(tmp_path: Path):
    folder, _ = journalled_run(tmp_path)
    before = measured_source(folder)
    with Journal.open(folder.gateway_journal, GatewayRecord) as journal:
        journal.append(
            Opened(
                session=0, execution="e000000-0", attempt=0, seed=0, temperature=1.0, trainable=True,
                max_context_tokens=100, max_tokens_per_call=10, model="policy",
            )
        )  # fmt: skip
        journal.append(
            CallStarted(
                session=0, call=0, base=-1, base_tokens=0, context_ids=b"", cause=BranchCause.ROOT, hints=RoleHints(dialect="chat"), at=100.0, key=b"",
                ordinal=0, first_index=0, dialect="chat",
            )
        )  # fmt: skip
        journal.append(
            CallFinished(
                session=0, call=0, reason="stop", num_sampled=0, cached_tokens=0, abandoned=False, at=500.0, num_moves=1,
                held_s=300.0, detail="", num_seen=0,
            )
        )  # fmt: skip
    after = measured_source(folder)
    assert before.groups[0].durations_s[0] - after.groups[0].durations_s[0] == pytest.approx(300.0)
    assert after.workload.decode_share * sum(sum(g.durations_s) for g in after.groups) == pytest.approx(100.0)
    assert after.workload.move_stall_s > 0


def test_run_that_trained_on_nothing_is_refused(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.journal.mkdir()
    folder.config.write_text("[scheduler]\n")
    with Journal.open(folder.controller_journal, ControllerRecord):
        pass
    with pytest.raises(ConfigError, match="no rollout group of this run was trained on yet"):
        measured_source(folder)


def test_run_that_is_being_prepared_has_trained_on_nothing(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("[scheduler]\n")
    with pytest.raises(ConfigError, match="no rollout group of this run was trained on yet"):
        measured_source(folder)


def test_run_that_has_lost_its_journal_is_refused(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("[scheduler]\n")
    folder.journal.mkdir()
    folder.gateway_journal.touch()
    with pytest.raises(ConfigError, match="the journal cannot be read"):
        measured_source(folder)
