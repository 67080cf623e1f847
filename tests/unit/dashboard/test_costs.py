"""Where the devices and the tokens of a run went."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.core.ids import ExecutionId, GroupId, MicroStepId, ServerId
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.dashboard.costs import RunCosts, run_costs
from qwengyre.dashboard.demo import unpack_demo
from qwengyre.dashboard.executions import ExecutionTable
from qwengyre.dashboard.series import series_of
from qwengyre.journal import Journal
from qwengyre.runtime.records import CallCounts, ControllerRecord, Decided, ExecutionDone, GroupJudged
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.telemetry.records import RolesChanged, RunEnded, WaterlevelSampled
from qwengyre.telemetry.summary import Summary
from qwengyre.trajectory.process import Judgement
from tests.unit.dashboard.synthetic import step


def outcome(score: float, validity: Validity = Validity.VALID) -> Outcome:
    return Outcome(End.EXITED, validity, score, "", 1.0)


REWARDS = (
    ((1.0, 0.0), True),  # taught something
    ((1.0, 1.0), True),  # nothing to learn from
    ((1.0, 0.0), False),  # waits for its step
)


def write_journal(path: Path) -> None:
    """Three training groups of two executions and one evaluation, a hundred tokens each; 3 s of a micro-step, 1 s of the optimizer."""
    with Journal.open(path, ControllerRecord) as journal:
        journal.append(ev.RunStarted(0.0))
        for number, (rewards, is_taken) in enumerate([*REWARDS, ((0.5, 0.5), False)]):
            group, kind = GroupId(number), "evaluation" if number == 3 else "train"
            names = [ExecutionId(f"e{number:06d}-{index}") for index in range(2)]
            journal.append(
                Decided((cmd.Dispatch(group, kind, 0, 2), *(cmd.Start(name, 0, ServerId("cell-1")) for name in names)))
            )
            for name, reward in zip(names, rewards, strict=True):
                done = outcome(reward, Validity.PLACEHOLDER if number == 0 and reward == 0.0 else Validity.VALID)
                journal.append(ExecutionDone(name, group, 0, "task", 1.0, done, CallCounts(3, 100, 200), 36.0))
                journal.append(ev.ExecutionEnded(36.0, name, 0))
            if is_taken:
                journal.append(Decided((cmd.TakeGroup(group, 0, 0),)))
        journal.append(Decided((cmd.Compute(1, 0, 0, MicroStepId("m")),)))  # type: ignore[arg-type]
        journal.append(ev.MicroStepDone(39.0, 1, 0))  # type: ignore[arg-type]
        journal.append(Decided((cmd.RunOptimizer(2, 0, 2),)))
        journal.append(ev.StepDone(40.0, 2))


@pytest.fixture
def costs(tmp_path: Path) -> RunCosts:
    """Of a run of 100 s: cell 0 trains from 30 s to 50 s, cell 1 is lost from 90 s on; half of the slots are empty until 20 s."""
    write_journal(tmp_path / "controller.log")
    table = ExecutionTable(tmp_path / "controller.log")
    assert table.refresh()
    records: list = [
        *(RolesChanged(0.0, 0, "rollout"), RolesChanged(0.0, 1, "rollout"), WaterlevelSampled(0.0, 8, 16)),
        *(
            WaterlevelSampled(20.0, 16, 16),
            RolesChanged(30.0, 0, "training"),
            msgspec.structs.replace(step(1, 40.0), tokens_trained=70),
            RolesChanged(50.0, 0, "rollout"),
        ),
        *(RolesChanged(90.0, 1, "lost"), RunEnded(100.0, "finished")),
    ]
    return run_costs(series_of(records, Summary(idle_share=0.4), label="a run"), table, devices_per_cell=2)


def test_device_hours_are_those_of_the_cells_times_their_devices(costs: RunCosts):
    seconds = {role: round(hours * 3600) for role, hours in costs.device_h.items()}
    assert seconds == {"rollout": 2 * 170, "training": 2 * 20, "changing role": 0, "lost": 2 * 10}


def test_every_token_has_one_fate(costs: RunCosts):
    assert costs.tokens_by_fate == {
        "trained": 70,
        "evaluations": 200,
        "groups without a spread": 200,
        "executions that were not scored": 100,
        "side calls, and beyond trajectory.j_max": 30,
        "not trained yet": 200,
    }
    assert sum(costs.tokens_by_fate.values()) == costs.tokens_generated == 800
    assert costs.tokens_thrown_away == 200 + 100 + 30


@pytest.mark.parametrize(
    ("advantages", "keeps_zero", "fates"),
    [
        ((None, None), False, {"left out by a hook": 200}),
        ((0.0, None), False, {"given no advantage by a hook": 100, "left out by a hook": 100}),
        ((0.0, 0.5), False, {"given no advantage by a hook": 100, "in trained groups": 100}),
        ((0.0, 0.5), True, {"in trained groups": 200}),
        (None, False, {"groups without a spread": 200}),
        (None, True, {"in trained groups": 200}),
    ],
)
def test_what_hooks_and_zero_advantages_do_to_a_group_is_told(tmp_path: Path, advantages, keeps_zero, fates):
    """Of the group of two rewards of 1: a hook's advantage counts in place of the built-in one, which would be 0."""
    write_journal(tmp_path / "controller.log")
    if advantages is not None:
        with Journal.open(tmp_path / "controller.log", ControllerRecord) as journal:
            journal.append(GroupJudged(GroupId(1), Judgement(advantages, (None, None))))
    table = ExecutionTable(tmp_path / "controller.log")
    assert table.refresh()
    trained = msgspec.structs.replace(step(1, 40.0), tokens_trained=10_000)
    run = series_of([trained], Summary(), label="a run")
    found = run_costs(run, table, keeps_zero=keeps_zero).tokens_by_fate
    others = {"evaluations": 200, "executions that were not scored": 100, "not trained yet": 200}
    expected = {"trained" if fate == "in trained groups" else fate: count for fate, count in fates.items()}
    expected["trained"] = expected.get("trained", 0) + 100
    assert found == others | expected


def test_idle_time_has_causes_that_add_up(costs: RunCosts):
    seconds = {cause: round(hours * 3600, 6) for cause, hours in costs.idle_h.items()}
    assert seconds == {
        "cells lost": 2 * 10,
        "training: waiting for groups or for each other": 2 * (20 - 3 - 1),
        "rollout: no execution for a slot": 2 * (20 * 2 * 0.5),
        "rollout: harnesses at work, no call to answer": 2 * (0.4 * 200 - 10 - 16 - 20),
    }


def test_sandbox_hours_are_from_start_to_score(costs: RunCosts):
    assert costs.sandbox_h == pytest.approx(2 * 36 / 3600), "the others were started at 36 s, when they ended"


def test_a_report_says_what_elastic_saved_against_both_baselines(tmp_path: Path):
    run = unpack_demo(tmp_path) / "quickstart"
    words = ["report", str(run), "--compare"]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 0, result.output
    html = (run / "report.html").read_text()
    saved = html.split("What elastic saved")[1].split("</section>")[0]
    assert all(f"<td>{policy}</td>" in saved for policy in ("elastic", "colocate", "async"))
    costs = html.split("What it cost")[1].split("</section>")[0]
    assert "<td>tokens generated</td><td>81,871</td>" in costs and "<td>- trained</td><td>55,425</td>" in costs
