"""Simulated runs against the independent simulator's figures, against their bounds, and against themselves."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.bounds import LowerBounds, bounds, least_hours
from qwengyre.sim.compare import compare, report_json, splits
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.planner import pareto, plan, plan_toml
from qwengyre.sim.results import Drawn, Inline, SimulationJob, fastest, run_job, simulate
from qwengyre.sim.settings import POLICY_NAMES, Setting, build
from qwengyre.sim.workload import Workload, builtin_workloads

WORKLOADS = builtin_workloads()
TABLE = {
    "nl122_v1": (71.6, 20, 105.9, 102.9),
    "nl122_v2": (73.0, 24, 101.4, 105.6),
    "t24_v1a": (76.0, 96, 100.2, 92.9),
    "tb_v1": (18.9, 16, 29.1, 35.0),
}
"""Elastic hours, best training nodes of Async, its hours, Colocate hours: the table of issue 3."""


def small(**change: object) -> Workload:
    return msgspec.structs.replace(
        WORKLOADS["nl122_v1"], **{"steps": 6, "groups_per_step": 4, "executions_per_group": 4, **change}
    )


@pytest.mark.parametrize("name", TABLE)
def test_hours_and_ratios_agree_with_the_independent_simulator_within_3_percent(name: str):
    elastic_h, nodes, async_h, colocate_h = TABLE[name]
    settings = [Setting(), Setting(policy="async", training_nodes=nodes), Setting(policy="colocate")]
    elastic, split, colocate = simulate(Drawn(WORKLOADS[name]), settings, [0, 1, 2, 3], Inline())
    assert elastic.hours == pytest.approx(elastic_h, rel=0.03)
    assert split.hours == pytest.approx(async_h, rel=0.03)
    assert colocate.hours == pytest.approx(colocate_h, rel=0.03)
    assert split.hours / elastic.hours == pytest.approx(async_h / elastic_h, rel=0.03)
    assert colocate.hours / elastic.hours == pytest.approx(colocate_h / elastic_h, rel=0.03)


def test_best_split_of_async_is_found():
    report = compare("v1", Drawn(msgspec.structs.replace(WORKLOADS["nl122_v1"], steps=12)), Setting(), ["async"], [0], Inline())
    assert report.results[0].settings.training_nodes == 20


def test_a_search_bounds_nothing_but_what_it_chose_and_finds_the_same(monkeypatch: pytest.MonkeyPatch):
    source, seeds = Drawn(small()), [0, 1]
    candidates = splits(source.workload, Setting(policy="async"))
    expected = min(simulate(source, candidates, seeds, Inline()), key=lambda result: result.hours)
    bounded = []

    def counted(workload: Workload, config: SchedulerConfig, *rest: object) -> LowerBounds:
        bounded.append(config.training_cells * workload.cell_nodes)
        return bounds(workload, config, *rest)

    monkeypatch.setattr("qwengyre.sim.results.bounds", counted)
    assert fastest(source, candidates, seeds, Inline()) == expected
    assert len(candidates) > 1 and bounded == [expected.settings.training_nodes] * len(seeds)


def test_policy_that_divides_the_pool_is_refused_for_one_cell():
    with pytest.raises(ValueError, match="async divides the pool, but 4 nodes are one cell"):
        compare("one", Drawn(small(nodes=4)), Setting(), ["elastic", "async"], [0], Inline())


ABLATION_SEEDS = range(20)
"""Colocate waits for the slowest of 400 executions: five seeds tell its mean to 1.5 points only."""


def test_ablations_agree_with_the_independent_simulator_within_1_5_points():
    source = Drawn(msgspec.structs.replace(WORKLOADS["nl122_v1"], steps=12))
    settings = [
        Setting(policy="async", training_nodes=20),
        Setting(policy="async-streaming", training_nodes=20),
        Setting(policy="colocate"),
        Setting(policy="colocate-standalone", standalone_nodes=12),
        Setting(policy="colocate-standalone-streaming", standalone_nodes=12),
        Setting(),
        Setting(cell_nodes=8),
    ]
    results = simulate(source, settings, ABLATION_SEEDS, Inline())
    split, streaming, colocate, standalone, both, elastic, coarse = (result.hours for result in results)
    assert 1 - streaming / split == pytest.approx(0.129, abs=0.015)
    assert 1 - standalone / colocate == pytest.approx(0.041, abs=0.015)
    assert 1 - both / standalone == pytest.approx(0.092, abs=0.015)
    assert both / elastic == pytest.approx(1.22, abs=0.015)
    assert coarse / elastic - 1 == pytest.approx(0.035, abs=0.015)


@pytest.mark.parametrize(("num_micro_steps", "rounds"), [(3, 1), (4, 2), (6, 2), (7, 3)])
def test_replicas_of_one_big_cell_compute_whole_micro_steps(num_micro_steps: int, rounds: int):
    """12 nodes in one cell are three replicas of 4: what does not fill a round of three leaves replicas idle."""
    workload = small(
        steps=1, groups_per_step=1, nodes=12, dispatch_depth=0.0, micro_steps_per_group=num_micro_steps, replica_overhead=0.1
    )
    config, pool = build(workload, Setting(policy="colocate"))
    durations = Durations.draw(workload, 0)
    hours = SimDriver(workload, config, pool, durations).run().hours
    micro_step_s = durations.train_GN.sum() / num_micro_steps / 4 * (1 + 0.1 * 2)
    serial_s = workload.to_training_s + workload.optimizer_s + workload.publish_s
    assert hours * 3600 == pytest.approx(durations.unloaded_GN.max() + rounds * micro_step_s + serial_s)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("name", ["nl122_v2", "tb_v1"])
def test_no_policy_beats_the_bounds_and_the_invariants_hold(policy: str, name: str):
    workload = msgspec.structs.replace(WORKLOADS[name], steps=3, steps_per_burst=1)
    setting = splits(workload, Setting(policy=policy))[0]
    config, pool = build(workload, setting)
    durations = Durations.draw(workload, 1)
    meters = SimDriver(workload, config, pool, durations).run(check=Scheduler.validate)
    assert meters.hours >= bounds(workload, config, pool, durations).joint


def test_bounds_are_exact_where_a_run_leaves_no_choice():
    """One group of one execution on one cell: it runs, then it trains, then optimizer and publish."""
    workload = small(steps=1, groups_per_step=1, executions_per_group=1, nodes=4, dispatch_depth=0.0, to_training_s=0.0)
    config, pool = build(workload, Setting())
    durations = Durations.draw(workload, 0)
    hours = SimDriver(workload, config, pool, durations).run().hours
    found = bounds(workload, config, pool, durations)
    assert found.path == found.joint == pytest.approx(hours)
    expected = durations.unloaded_GN[0, 0] + durations.train_GN[0, 0] / 4 + workload.optimizer_s + workload.publish_s
    assert hours * 3600 == pytest.approx(expected)


def test_work_bound_counts_every_node_busy():
    workload = small()
    durations = Durations.draw(workload, 0)
    config, pool = build(workload, Setting())
    slots = round(4 * workload.slots_per_node) / 4
    expected = (durations.unloaded_GN.sum() / slots + durations.train_GN.sum()) / workload.nodes / 3600
    assert bounds(workload, config, pool, durations).work == pytest.approx(expected)


def test_a_straggler_in_every_group_makes_the_cap_on_staleness_the_bound():
    """Each step's groups take two hours and no work: with D = 1, a step ends two hours after the publish two versions before it."""
    workload = small(
        steps=6, sigma_query=0.0, sigma_execution=0.0, median_h=2.0, train_node_hours_per_step=0.0, optimizer_s=0.0,
        publish_s=0.0, to_training_s=0.0,
    )  # fmt: skip
    config, pool = build(workload, Setting(steps_per_burst=1, dispatch_depth=1.0, max_staleness=1))
    found = bounds(workload, config, pool, Durations.draw(workload, 0))
    assert found.path == found.joint == pytest.approx(6.0)


def test_what_a_chain_makes_idle_is_not_made_up_for():
    """The first group cannot be trained before it is ready, and one group at a time leaves most slots free: work alone says less."""
    workload = small(dispatch_depth=0.0, steps_per_burst=1, groups_per_step=1)
    config, pool = build(workload, Setting())
    durations = Durations.draw(workload, 0)
    found = bounds(workload, config, pool, durations)
    assert found.joint > 1.5 * found.work
    assert found.joint <= SimDriver(workload, config, pool, durations).run().hours


def test_cells_that_train_together_cost_what_each_slows_the_others():
    """Training alone fills the pool, so all cells train nearly always: with an overhead of o, j cells do sum 1 / (1 + o i) of one."""
    workload = small(train_node_hours_per_step=400.0, replica_overhead=0.1, median_h=0.01, optimizer_s=0.0, publish_s=0.0)
    config, pool = build(workload, Setting())
    found = bounds(workload, config, pool, Durations.draw(workload, 0))
    together = sum(1 / (1 + 0.1 * i) for i in range(8)) / 8
    assert found.joint == pytest.approx(found.work / together, rel=0.01)


def test_no_mu_and_phi_under_a_cap_has_a_bound_below_the_least():
    workload = small(steps=4)
    durations = Durations.draw(workload, 0)
    config, pool = build(workload, Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=2))
    found = []
    for mu, phi in ((1, 0.0), (1, 0.25), (1, 2.0), (2, 0.5), (2, 1.0), (3, 0.0)):
        one, _ = build(workload, Setting(steps_per_burst=mu, dispatch_depth=phi, max_staleness=2))
        found.append(bounds(workload, one, pool, durations).joint)
    assert least_hours(workload, config, pool, durations) == pytest.approx(min(found), rel=0.02)
    assert least_hours(workload, config, pool, durations) <= min(found)
    with pytest.raises(ValueError, match="max_staleness is unset"):
        least_hours(workload, build(workload, Setting())[0], pool, durations)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_gap_to_the_work_bound_is_the_sum_of_its_causes(policy: str):
    setting = splits(WORKLOADS["tb_v1"], Setting(policy=policy))[0]
    run = run_job(SimulationJob(Drawn(msgspec.structs.replace(WORKLOADS["tb_v1"], steps=4)), setting, 0))
    assert sum(run.gap_parts.values()) == pytest.approx(run.hours - run.bound_work)
    assert all(hours >= -1e-9 for hours in run.gap_parts.values())
    assert run.gap_parts["publish"] > 0 and run.gap_parts["optimizer"] > 0
    if policy.startswith("async"):
        assert run.gap_parts["warm_up"] > 0, "its training nodes wait for the first group"


def test_overall_timeout_drops_an_execution_since_it_started_and_its_group_still_counts():
    workload = small(overall_timeout_h=1.9, sigma_query=0.0, sigma_execution=0.3)
    config, pool = build(workload, Setting())
    durations = Durations.draw(workload, 0)
    meters = SimDriver(workload, config, pool, durations).run()
    assert meters.num_dropped == int((durations.unloaded_GN > 1.9 * 3600).sum()) > 0
    assert meters.finished_at > 0


def test_equal_seeds_give_equal_runs_and_common_random_numbers_across_policies():
    job = SimulationJob(Drawn(small()), Setting(), 3)
    assert run_job(job) == run_job(job)
    assert run_job(job) != run_job(SimulationJob(Drawn(small()), Setting(), 4))


def test_meters_account_for_all_time():
    workload = small()
    config, pool = build(workload, Setting())
    driver = SimDriver(workload, config, pool, Durations.draw(workload, 0), is_recorded=True)
    meters = driver.run()
    timeline = meters.timeline()
    per_cell = [sum(span.end - span.start for span in timeline.roles if span.cell == cell) for cell in range(config.num_cells)]
    assert per_cell == pytest.approx([meters.finished_at] * config.num_cells)
    training_s = sum(span.end - span.start for span in timeline.roles if span.state == "training")
    assert meters.training_s == pytest.approx(training_s)
    assert meters.used_slot_s == pytest.approx(
        driver.durations.unloaded_GN.sum() + workload.move_stall_s * meters.num_moves, rel=1e-6
    )
    assert meters.compute_s * pool.cell_nodes == pytest.approx(driver.durations.train_GN.sum())


def test_token_staleness_is_the_groups_where_versions_do_not_change_under_an_execution():
    workload = small(steps=4, steps_per_burst=1, dispatch_depth=0.0)
    config, pool = build(workload, Setting(policy="colocate"))
    meters = SimDriver(workload, config, pool, Durations.draw(workload, 0)).run()
    assert (meters.staleness_mean, meters.staleness_max) == (0.0, 0)
    assert meters.staleness_token == pytest.approx(0.0, abs=1e-9)


def test_hard_cap_holds_and_two_way_beats_the_papers_setting_at_equal_maximum():
    workload = msgspec.structs.replace(WORKLOADS["nl122_v1"], steps=24)
    settings = [Setting(), Setting(steps_per_burst=1, dispatch_depth=3.0, two_way=True, max_staleness=3)]
    base, ours = simulate(Drawn(workload), settings, [0, 1], Inline())
    assert ours.staleness_max <= 3
    assert ours.hours < 0.96 * base.hours


def test_longest_first_lets_a_backlog_wait_where_executions_are_as_long_as_the_cap():
    """tb_v1: what is due in three steps takes up to the timeout, so a backlog alone delays steps; the short ones may wait."""
    known = msgspec.structs.replace(WORKLOADS["tb_v1"], foresight_error=0.14)
    bare = Setting(steps_per_burst=1, dispatch_depth=2.0, two_way=True, backlog=1.0, max_staleness=2)
    without, ordered = simulate(Drawn(known), [bare, msgspec.structs.replace(bare, order="longest-first")], [0, 1], Inline())
    assert ordered.staleness_max <= 2 and ordered.hours < 0.96 * without.hours
    with pytest.raises(ValueError, match=r"set foresight_error of the workload, 0\.14 if each task"):
        build(WORKLOADS["tb_v1"], msgspec.structs.replace(bare, order="longest-first"))


def test_what_is_foreseen_changes_no_duration():
    known = msgspec.structs.replace(WORKLOADS["tb_v1"], foresight_error=0.5)
    drawn, bare = Durations.draw(known, 3), Durations.draw(WORKLOADS["tb_v1"], 3)
    assert np.array_equal(drawn.unloaded_GN, bare.unloaded_GN) and bare.expected_G is None
    errors_G = np.log(drawn.expected_G / 3600 / known.median_h)
    assert np.corrcoef(errors_G, np.log(drawn.unloaded_GN).mean(axis=1))[0, 1] > 0.5


def test_a_backlog_keeps_rollout_full_at_the_same_cap():
    workload = msgspec.structs.replace(WORKLOADS["nl122_v1"], steps=24)
    bare = Setting(steps_per_burst=1, dispatch_depth=3.0, two_way=True, max_staleness=3)
    without, with_backlog = simulate(Drawn(workload), [bare, msgspec.structs.replace(bare, backlog=1.0)], [0, 1], Inline())
    assert with_backlog.staleness_max <= 3
    assert with_backlog.idle_rollout < without.idle_rollout and with_backlog.hours < 0.98 * without.hours


def test_json_has_the_fields_that_are_promised():
    workload = small(steps=3)
    report = compare("mine", Drawn(workload), Setting(), ["elastic", "colocate"], [0, 1], Inline())
    data = msgspec.json.decode(report_json(report, workload))
    assert data["workload"] == "mine" and data["seeds"] == [0, 1]
    promised = (
        "policy settings hours hours_min hours_max ratio_to_elastic bound_work bound_path staleness_mean staleness_max dropped"
    )
    for result in data["results"]:
        assert set(promised.split()) <= set(result)
    assert [result["policy"] for result in data["results"]] == ["elastic", "colocate"]
    assert data["results"][0]["ratio_to_elastic"] == 1.0
    assert data["results"][0]["settings"]["cell_nodes"] == 4


def test_planner_keeps_the_cap_and_prints_what_a_run_can_read():
    workload = msgspec.structs.replace(WORKLOADS["nl122_v1"], steps=6)
    found = plan(Drawn(workload), [0], Inline(), max_staleness=2)
    assert all(result.staleness_max <= 2 for result in found.best)
    assert found.best[0].hours == min(result.hours for result in found.best)
    assert [r.staleness_mean for r in found.front] == sorted(r.staleness_mean for r in found.front)
    table = msgspec.toml.decode(plan_toml(workload, found.best[0].settings))["scheduler"]
    config, _ = build(workload, found.best[0].settings)
    assert {key: getattr(config, key) for key in table} == table


def test_front_has_no_result_that_another_beats():
    results = simulate(Drawn(small(steps=3)), [Setting(dispatch_depth=phi) for phi in (0.0, 0.5, 1.0, 2.0)], [0], Inline())
    front = pareto(results)
    for one in front:
        assert not any(r.hours < one.hours and r.staleness_mean <= one.staleness_mean for r in results)
    assert np.all(np.diff([r.hours for r in front]) < 0)


def test_a_pool_that_toggles_trains_while_executions_wait_and_drops_the_same_as_colocate():
    workload = msgspec.structs.replace(WORKLOADS["tb_v1"], steps=6)
    ahead = Setting(policy="toggle", steps_per_burst=1, dispatch_depth=1.0)
    toggle, colocate = (
        run_job(SimulationJob(Drawn(workload), msgspec.structs.replace(ahead, policy=policy), 0))
        for policy in ("toggle", "colocate")
    )
    assert toggle.hours < 0.8 * colocate.hours, "it does not wait until nobody runs"
    assert toggle.dropped == colocate.dropped > 0, "a pause is no time that an execution had"
    assert toggle.bound_joint <= toggle.hours
    with pytest.raises(ValueError, match="set steps_per_burst = 1"):
        build(workload, Setting(policy="toggle"))
