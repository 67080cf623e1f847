"""Random workloads under every policy: the invariants hold after every event, every run ends, and none beats a bound."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.scheduler import events as ev
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.bounds import bounds, least_cost, least_hours
from qwengyre.sim.compare import splits
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import VARIANTS, Setting, build
from qwengyre.sim.workload import Workload


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    cell_nodes, num_cells, executions = draw(st.integers(1, 3)), draw(st.integers(2, 6)), draw(st.integers(1, 5))
    return Workload(
        steps=draw(st.integers(1, 5)),
        groups_per_step=draw(st.integers(1, 4)),
        executions_per_group=executions,
        steps_per_burst=draw(st.integers(1, 3)),
        dispatch_depth=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.5])),
        nodes=cell_nodes * num_cells,
        cell_nodes=cell_nodes,
        slots_per_node=draw(st.floats(1.0, 6.0)) * max(1.0, executions / num_cells),
        median_h=draw(st.floats(0.1, 4.0)),
        sigma_query=draw(st.floats(0.0, 0.8)),
        sigma_execution=draw(st.floats(0.0, 0.8)),
        overall_timeout_h=draw(st.floats(0.5, 8.0)),
        train_node_hours_per_step=draw(st.floats(0.0, 30.0)),
        train_share_by_duration=draw(st.floats(0.0, 1.0)),
        micro_steps_per_group=draw(st.integers(1, 4)),
        replica_overhead=draw(st.floats(0.0, 0.1)),
        optimizer_s=draw(st.floats(0.0, 100.0)),
        publish_s=draw(st.floats(0.0, 100.0)),
        decode_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        slowdown=draw(st.floats(1.0, 3.0)),
    )


def magnitudes(least: int, most: int) -> st.SearchStrategy[float]:
    return st.floats(least, most).map(lambda exponent: 10.0**exponent)


@st.composite
def extreme_workloads(draw: st.DrawFn) -> Workload:
    """Small pools whose every duration may be tiny or huge beside the others."""
    return msgspec.structs.replace(
        draw(workloads()),
        median_h=draw(magnitudes(-9, 9)),
        sigma_query=draw(st.floats(0.0, 5.0)),
        sigma_execution=draw(st.floats(0.0, 5.0)),
        overall_timeout_h=draw(magnitudes(-9, 9)),
        train_node_hours_per_step=draw(magnitudes(-9, 9)),
        optimizer_s=draw(st.just(0.0) | magnitudes(-3, 9)),
        publish_s=draw(st.just(0.0) | magnitudes(-3, 9)),
        to_training_s=draw(st.just(0.0) | magnitudes(-3, 9)),
        move_stall_s=draw(st.just(0.0) | magnitudes(-3, 9)),
        replica_overhead=draw(magnitudes(-3, 3)),
        slowdown=draw(magnitudes(0, 6)),
    )


ROUNDED = Workload(
    steps=3,
    groups_per_step=1,
    executions_per_group=1,
    steps_per_burst=1,
    dispatch_depth=0.0,
    nodes=2,
    cell_nodes=1,
    slots_per_node=1.0,
    median_h=2.0,
    sigma_query=0.5,
    sigma_execution=0.0,
    overall_timeout_h=3.0,
    train_node_hours_per_step=1.0,
    train_share_by_duration=0.0,
    micro_steps_per_group=1,
    optimizer_s=0.0,
    publish_s=0.0,
)


def test_a_replica_that_is_done_but_for_rounding_computes_no_negative_time():
    setting = splits(ROUNDED, Setting(policy="colocate"))[0]
    config, pool = build(ROUNDED, setting)
    durations = Durations.draw(ROUNDED, 1)
    meters = SimDriver(ROUNDED, config, pool, durations).run()
    assert meters.idle.spent().computing == pytest.approx(2 * 3600)
    assert_parts_sum(meters, bounds(ROUNDED, config, pool, durations).work, ROUNDED, config, pool, durations)


@settings(max_examples=60)
@given(
    workload=workloads() | extreme_workloads(),
    policy=st.sampled_from(sorted(VARIANTS)),
    seed=st.integers(0, 1000),
    two_way=st.booleans(),
    backlog=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    is_capped=st.booleans(),
    data=st.data(),
)
def test_runs_end_above_their_bounds(
    workload: Workload, policy: str, seed: int, two_way: bool, backlog: float, is_capped: bool, data: st.DataObject
):
    if VARIANTS[policy].pauses:
        workload = msgspec.structs.replace(workload, steps_per_burst=1)
    cap = math.ceil(workload.steps_per_burst + workload.dispatch_depth) - 1 if is_capped else None
    base = Setting(policy=policy, two_way=two_way, backlog=backlog if two_way else 0.0, max_staleness=cap)
    setting = data.draw(st.sampled_from(splits(workload, base)))
    config, pool = build(workload, setting)
    durations = Durations.draw(workload, seed)
    driver = SimDriver(workload, config, pool, durations)
    meters = driver.run(check=Scheduler.validate)
    assert driver.scheduler.state.is_finished and driver.scheduler.state.steps_done == workload.steps
    assert driver.scheduler.state.num_ended == workload.num_groups * workload.executions_per_group
    found = bounds(workload, config, pool, durations)
    assert max(found.work, found.path) <= found.joint * (1 + 1e-9)
    assert meters.hours >= found.joint * (1 - 1e-9)
    if cap is not None:
        assert least_hours(workload, config, pool, durations) <= found.joint * (1 + 1e-9)
    assert_parts_sum(meters, found.work, workload, config, pool, durations)


def assert_parts_sum(meters, work_h, workload, config, pool, durations) -> None:
    """What is above the work bound, by cause: nothing is missing and nothing is counted twice."""
    parts = meters.idle.spent().parts(workload.nodes, least_cost(workload, config, pool, durations))
    assert sum(parts.values()) == pytest.approx(meters.hours - work_h, rel=1e-6, abs=1e-6 * meters.hours)
    for name, hours in parts.items():
        assert name == "load" or hours >= -1e-6 * meters.hours, name


@settings(max_examples=15)
@given(
    workload=workloads(),
    seed=st.integers(0, 1000),
    cap=st.integers(0, 4),
    plans=st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 5.0), st.booleans(), st.floats(0.0, 2.0)), max_size=8),
)
def test_no_sequence_of_plans_ends_before_the_bound_of_their_cap(workload: Workload, seed: int, cap: int, plans: list[tuple]):
    """What a tuner may say at most: any plan after any step."""
    workload = msgspec.structs.replace(workload, steps=6)
    setting = Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=cap, tune=True)
    config, pool = build(workload, setting)
    durations = Durations.draw(workload, seed)

    def next_plan(scheduler: Scheduler, event: ev.Event, commands: list) -> ev.Retuned | None:
        if not isinstance(event, ev.StepDone) or not plans:
            return None
        mu, phi, two_way, backlog = plans.pop()
        mu = min(mu, cap + 1)
        return ev.Retuned(event.at, mu, min(phi, cap + 1 - mu), two_way, backlog if two_way else 0.0, "drawn")

    driver = SimDriver(workload, config, pool, durations, retune=next_plan)
    meters = driver.run(check=Scheduler.validate)
    found = bounds(workload, config, pool, durations)
    assert meters.staleness_max <= cap
    assert meters.hours >= found.joint * (1 - 1e-9)
    assert_parts_sum(meters, found.work, workload, config, pool, durations)
