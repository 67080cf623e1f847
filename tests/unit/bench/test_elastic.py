"""What the elastic bench compares: equal prices on both sides, and switches burst by burst."""

from __future__ import annotations

import msgspec
import pytest

from qwengyre.bench.elastic import SMALL, require_small, simulate
from qwengyre.bench.paced_run import PacedSettings, make_plan
from qwengyre.bench.switches import Switch, Switches, worst_gap
from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import Setting, build

TEN_S = PacedSettings(seconds_per_hour=10.0, lead_s=0.1)


def switches(*times: float, end: float = 20.0) -> Switches:
    return Switches(tuple(Switch(0 if at < 10 else 1, 0, "leaves", at) for at in times), ((0, 0.0), (1, 10.0)), end)


def test_switches_are_counted_in_their_burst():
    assert switches(1.0, 9.0, 12.0).per_burst() == [2, 1]


def test_gap_is_a_share_of_the_burst_and_ignores_that_bursts_began_late():
    simulated = switches(1.0, 12.0)
    late = Switches(
        (Switch(0, 0, "leaves", 1.5), Switch(1, 0, "leaves", 13.0)),
        ((0, 0.0), (1, 11.0)),
        21.0,
    )
    assert worst_gap(late, simulated) == pytest.approx(0.05)
    assert worst_gap(switches(), simulated) is None


def test_scaled_to_another_clock():
    assert switches(1.0, end=20.0).scaled(360.0) == Switches((Switch(0, 0, "leaves", 360.0),), ((0, 0.0), (1, 3600.0)), 7200.0)


@pytest.mark.parametrize("policy", ["elastic", "colocate"])
def test_plan_prices_the_same_work_as_the_simulator(policy):
    durations = Durations.draw(SMALL, seed=3)
    _, pool = build(SMALL, Setting(policy=policy))
    plan = make_plan(SMALL, durations, pool, TEN_S)
    assert plan.executions_s[5][2] + TEN_S.lead_s == pytest.approx(durations.unloaded_GN[5, 2] / 360)
    work = sum(plan.micro_steps_s) * SMALL.micro_steps_per_group * pool.cell_nodes / plan.num_replicas
    assert work == pytest.approx(SMALL.steps * SMALL.train_node_hours_per_step * 10, rel=0.02)


def test_too_much_compression_is_refused():
    _, pool = build(SMALL, Setting())
    with pytest.raises(QwenGyreError, match="seconds-per-hour"):
        make_plan(SMALL, Durations.draw(SMALL, seed=0), pool, PacedSettings(seconds_per_hour=0.5, lead_s=0.2))


def test_elastic_is_faster_than_its_baselines_on_the_small_workload():
    durations = Durations.draw(SMALL, seed=0)
    hours = {
        policy: simulate(
            SMALL, *build(SMALL, Setting(policy=policy, training_nodes=3 if policy == "async" else 0)), durations
        ).end
        for policy in ("elastic", "colocate", "async")
    }
    assert hours["elastic"] < hours["colocate"] < hours["async"]


def test_cells_that_leave_with_the_first_event_are_counted():
    durations = Durations.draw(SMALL, seed=0)
    fixed = simulate(SMALL, *build(SMALL, Setting(policy="async", training_nodes=3)), durations)
    assert fixed.per_burst() == [3, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots_per_node": 7}, "48 is the most"),
        ({"move_stall_s": 5}, "move_stall_s"),
        ({"micro_steps_per_group": 2}, "micro_steps_per_group"),
        ({"replica_overhead": 0.1}, "replica_overhead"),
    ],
)
def test_workload_that_cannot_be_paced_is_refused_with_what_to_change(change, message):
    with pytest.raises(ConfigError, match=message):
        require_small("mine", msgspec.structs.replace(SMALL, **change))
