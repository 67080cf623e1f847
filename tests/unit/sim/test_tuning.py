"""Plans that a run makes of its own history: what they are made from, what they are worth, and that they are the same every time."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from qwengyre.core.ids import GroupId, execution_id
from qwengyre.rpc.tether import tethered
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.history import History
from qwengyre.sim.results import Drawn, Inline, simulate
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.tuning import Evidence, Replanned, Tuner, depths, replan, retuner
from qwengyre.sim.workload import Workload, builtin_workloads

WORKLOAD = msgspec.structs.replace(
    builtin_workloads()["nl122_v1"], steps=12, groups_per_step=4, executions_per_group=4, nodes=8, train_node_hours_per_step=3.0
)
CAP = 2
CONFIG = SchedulerConfig(
    num_cells=2, slots_per_cell=4, steps=8, groups_per_step=1, executions_per_group=2, dispatch_depth=0.0, steps_per_burst=1,
    max_staleness=CAP, tune=True,
)  # fmt: skip


def evidence_after(num_steps: int, workload: Workload = WORKLOAD) -> Evidence:
    """What a simulated run that began badly has shown after some steps."""
    config, pool = build(workload, Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=CAP, tune=True))
    tuner = Tuner()
    found: list[Evidence] = []

    def see(scheduler: Scheduler, event: ev.Event, commands: list[cmd.Command]) -> None:
        tuner.history.see(event, commands)
        if isinstance(event, ev.StepDone) and scheduler.state.steps_done == num_steps:
            found.append(tuner.evidence(scheduler.planned, num_steps, event.at))

    SimDriver(workload, config, pool, Drawn(workload).durations(0), retune=see).run()
    return found[0]


@pytest.mark.parametrize(("mu", "phi"), [(1, 0.0), (3, 0.0)])
def test_a_run_that_begins_badly_loses_little_more_than_its_first_step(mu: int, phi: float):
    """Every plan of the search, simulated by itself, against the run that has to find it out. What it began with costs it one step."""
    bad = Setting(steps_per_burst=mu, dispatch_depth=phi, max_staleness=CAP)
    every = [
        Setting(
            steps_per_burst=plan.steps_per_burst,
            dispatch_depth=plan.dispatch_depth,
            two_way=plan.two_way,
            backlog=plan.backlog,
            max_staleness=CAP,
        )
        for plan in depths(build(WORKLOAD, bad)[0])
    ]
    tuned, untuned, *plans = simulate(Drawn(WORKLOAD), [msgspec.structs.replace(bad, tune=True), bad, *every], [0], Inline())
    best, first_step = min(plan.hours for plan in plans), untuned.hours / WORKLOAD.steps
    assert tuned.hours < min(untuned.hours, 1.02 * best + first_step)
    assert tuned.staleness_max <= CAP


FORESEEN = msgspec.structs.replace(WORKLOAD, foresight_error=0.1, sigma_query=0.5, groups_per_step=8)
"""Queries differ, and that is known before."""


def test_a_run_whose_groups_are_foreseen_finds_out_how_well_and_may_start_the_longest_first():
    evidence = evidence_after(4, FORESEEN)
    error = evidence.run.workload.foresight_error
    spread = (FORESEEN.foresight_error**2 + FORESEEN.sigma_execution**2 / FORESEEN.executions_per_group) ** 0.5
    num = len(evidence.run.groups)
    assert error is not None and abs(error / spread - 1) < 4 / (2 * num) ** 0.5, "four standard errors of a standard deviation"
    plan = replan(evidence)
    assert plan is not None and plan.order == "longest-first" and "foreseen within" in plan.reason


def test_nothing_is_ordered_by_what_was_not_foreseen():
    evidence = evidence_after(4)
    assert evidence.run.workload.foresight_error is None
    assert replan(evidence).order == "dispatch"


def test_equal_evidence_gives_an_equal_plan_here_and_in_a_process_of_its_own():
    evidence = evidence_after(4)
    here = replan(evidence)
    assert here is not None and here == replan(evidence)
    done = subprocess.run(
        tethered("qwengyre.sim.replan", []), input=msgspec.msgpack.encode(evidence), capture_output=True, check=True
    )
    assert msgspec.msgpack.decode(done.stdout, type=Replanned | None) == here


def test_no_plan_is_made_of_what_is_already_best():
    evidence = evidence_after(4)
    best = replan(evidence)
    fields = {name: getattr(best, name) for name in ("steps_per_burst", "dispatch_depth", "two_way", "backlog", "order")}
    assert replan(msgspec.structs.replace(evidence, config=msgspec.structs.replace(evidence.config, **fields))) is None


def started(durations_s: dict[int, float | None]) -> History:
    """Group i of two executions: the first ended after so many seconds or still runs, the second as the first; all start at 0."""
    history = History()
    for group, seconds in durations_s.items():
        names = [execution_id(GroupId(group), index) for index in range(2)]
        history.see(
            ev.RunStarted(at=0.0),
            [cmd.Dispatch(GroupId(group), "train", 0, 2), *(cmd.Start(name, 0, "cell-0") for name in names)],
        )
        if seconds is not None:
            for name in names:
                history.see(ev.ExecutionEnded(seconds, name, 0), [])
    micro_step = f"m{min(durations_s)}"
    first = GroupId(min(durations_s))
    history.see(ev.GroupReady(5.0, first, (micro_step,), 2), [cmd.Compute(7, 0, 0, micro_step)])
    history.see(ev.MicroStepDone(7.0, 7, 0), [])
    return history


def test_executions_that_still_run_take_as_long_as_those_that_took_longer():
    evidence = Tuner(started({0: 5.0, 1: 20.0, 2: None})).evidence(CONFIG, 1, now=10.0)
    assert [group.durations_s for group in evidence.run.groups] == [(5.0, 5.0), (20.0, 20.0), (20.0, 20.0)]


def test_executions_older_than_any_that_ended_count_their_age():
    evidence = Tuner(started({0: 5.0, 1: None})).evidence(CONFIG, 1, now=10.0)
    assert [group.durations_s for group in evidence.run.groups] == [(5.0, 5.0), (10.0, 10.0)]
    assert [group.micro_steps_s for group in evidence.run.groups] == [(2.0,), (2.0,)], (
        "an untrained group is as long as the others"
    )


def test_evidence_is_asked_for_when_there_is_news():
    tuner = Tuner(started({0: 5.0}))
    assert tuner.evidence(CONFIG, 1, now=10.0) is not None
    assert tuner.evidence(CONFIG, 1, now=11.0) is None, "nothing is new"
    assert tuner.evidence(CONFIG, 2, now=12.0) is not None
    assert tuner.evidence(CONFIG, CONFIG.steps - 2, now=99.0) is None, "everything is dispatched"
    assert Tuner().evidence(CONFIG, 1, now=1.0) is None, "nothing was trained on yet"


def test_a_simulated_run_is_tuned_the_same_way_twice():
    setting = Setting(steps_per_burst=1, dispatch_depth=0.0, max_staleness=CAP, tune=True)
    config, pool = build(WORKLOAD, setting)
    short = msgspec.structs.replace(WORKLOAD, steps=8)
    config = msgspec.structs.replace(config, steps=8)
    runs = [SimDriver(short, config, pool, Drawn(short).durations(0), retune=retuner()) for _ in range(2)]
    assert runs[0].run().hours == runs[1].run().hours
    assert runs[0].scheduler.config == runs[1].scheduler.config != config


def test_the_evidence_of_a_program_that_fails_is_not_a_plan():
    done = subprocess.run([sys.executable, "-m", "qwengyre.sim.replan"], input=b"\xc1", capture_output=True)
    assert done.returncode != 0 and not done.stdout
