"""The rules of dispatch, leaving, joining, closing and returning, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from qwengyre.core.errors import IllegalTransition
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from tests.property.random_driver import RandomDriver
from tests.unit.scheduler.play import Play

SMALL = dict(
    num_cells=3,
    slots_per_cell=2,
    steps=4,
    groups_per_step=2,
    executions_per_group=1,
    steps_per_burst=1,
    dispatch_depth=1.0,
)
"""Three cells of two slots; a publish dispatches up to (v + 2) * 2 groups of one execution."""


def test_publish_dispatches_up_to_the_depth_and_no_further():
    play = Play(**SMALL)
    assert [c.group for c in play.said(cmd.Dispatch)] == [0, 1, 2, 3]
    assert SchedulerConfig(**SMALL).num_groups_due(3) == 8, "never more than S * B"


@pytest.mark.parametrize(("version", "groups"), [(0, 28), (3, 52), (45, 384), (48, 384)])
def test_dispatch_depth_is_that_of_the_paper(version: int, groups: int):
    config = SchedulerConfig(steps=48, groups_per_step=8, steps_per_burst=3, dispatch_depth=0.5)
    assert config.num_groups_due(version) == groups


def test_a_run_without_steps_evaluates_and_ends():
    play = Play(**{**SMALL, "steps": 0}, evaluate_at_start=True, evaluation_group_sizes=(2, 1))
    assert [(c.kind, c.num_executions) for c in play.said(cmd.Dispatch)] == [("evaluation", 2), ("evaluation", 1)]
    play.end("e000000-0")
    assert play.end("e000000-1") == []
    report, finish = play.end("e000001-0")
    assert report == cmd.ReportEvaluation(0, (0, 1)) and finish == cmd.FinishRun(0)


def test_executions_go_to_the_least_loaded_server_and_ties_to_the_later_cell():
    play = Play(**SMALL)
    assert [c.server for c in play.said(cmd.Start)] == ["cell-2", "cell-1", "cell-0", "cell-2"]


def test_standalone_engines_win_ties():
    play = Play(**SMALL, num_standalone=1, slots_per_standalone=2)
    assert play.said(cmd.Start)[0].server == "standalone-0"


def test_queue_is_first_in_first_out_and_waits_for_a_slot():
    play = Play(**{**SMALL, "num_cells": 1})
    assert [c.execution for c in play.said(cmd.Start)] == ["e000000-0", "e000001-0"]
    assert [c.execution for c in play.end("e000001-0") if isinstance(c, cmd.Start)] == ["e000002-0"]


def test_core_leaves_first_once_waterlevel_allows_and_data_is_ready():
    play = Play(**SMALL)
    assert not play.said(cmd.Drain), "w = 4 fits the 4 slots that stay, but nothing is ready"
    out = play.end_group(0)
    assert [c.cell for c in out if isinstance(c, cmd.Drain)] == [0]


def test_core_waits_for_the_waterlevel_even_if_data_is_ready():
    play = Play(**{**SMALL, "num_cells": 2})
    play.end_group(0)
    assert play.scheduler.state.waterlevel == 3 and not play.said(cmd.Drain), "2 slots would stay"
    play.end_group(1)
    assert [c.cell for c in play.said(cmd.Drain)] == [0]


def test_executions_of_a_leaving_cell_go_to_standalone_engines_then_to_the_last_cells():
    play = Play(**{**SMALL, "num_cells": 4, "slots_per_cell": 3, "num_standalone": 1, "slots_per_standalone": 1})
    on_core = [c.execution for c in play.said(cmd.Start) if c.server == "cell-0"]
    assert not on_core
    play = Play(**{**SMALL, "num_cells": 2, "slots_per_cell": 4})
    drain = next(c for c in play.end_group(0) if isinstance(c, cmd.Drain))
    assert {move.server for move in drain.moves} == {"cell-1"} and len(drain.moves) == 2


def test_cells_leave_one_at_a_time_and_only_for_unclaimed_work():
    play = Play(**SMALL)
    play.end_group(0, ["a", "b", "c"])
    play.end_group(1, ["d"])
    assert [c.cell for c in play.said(cmd.Drain)] == [0], "cell 1 waits until the core has arrived"
    play.answer(cmd.Drain)
    play.answer(cmd.SwitchToTraining)
    assert [c.cell for c in play.said(cmd.Drain)] == [0], "the core claims first"
    play.answer(cmd.OpenStep)
    assert [c.cell for c in play.said(cmd.Drain)] == [0, 1]
    play.switch()
    play.answer_all(cmd.OpenStep, cmd.JoinStep)
    claimed = {c.cell: c.micro_step for c in play.said(cmd.Compute)}
    assert claimed == {0: "a", 1: "b"}


def test_satellite_stays_when_all_work_is_claimed():
    play = Play(**{**SMALL, "groups_per_step": 1, "dispatch_depth": 0.0})
    play.end_group(0, ["a"])
    play.switch()
    assert [c.cell for c in play.said(cmd.Drain)] == [0]


def test_satellite_leaves_all_the_same_when_told_to():
    play = Play(**{**SMALL, "groups_per_step": 1, "dispatch_depth": 0.0, "leave_only_for_work": False})
    play.end_group(0, ["a"])
    play.answer(cmd.Drain)
    play.answer(cmd.SwitchToTraining)
    play.answer(cmd.OpenStep)
    assert [c.cell for c in play.said(cmd.Drain)] == [0, 1]


def test_step_closes_with_its_members_and_valid_executions_when_every_micro_step_is_done():
    play = Play(**SMALL)
    play.end_group(0, ["a", "b"], num_valid=3)
    play.end_group(1, [], num_valid=2)
    play.switch()
    play.answer_all(cmd.OpenStep, cmd.JoinStep)
    play.answer(cmd.Compute)
    assert not play.said(cmd.CloseStep)
    out = play.answer(cmd.Compute)
    assert [c.members for c in out if isinstance(c, cmd.CloseStep)] == [(0, 1)]
    out = play.answer(cmd.CloseStep)
    assert [c.num_executions for c in out if isinstance(c, cmd.RunOptimizer)] == [5]


def test_oldest_version_is_taken_first():
    play = Play(
        **{
            **SMALL,
            "num_cells": 1,
            "slots_per_cell": 8,
            "policy": "async",
            "num_standalone": 1,
            "streaming": False,
            "slots_per_standalone": 8,
        }
    )
    play.switch()
    play.end_group(2)
    play.end_group(0)
    play.finish_step()
    assert [c.group for c in play.said(cmd.TakeGroup)] == [0, 2]


def test_publish_sends_all_cells_back_when_no_data_is_ready():
    play = Play(**SMALL)
    for group in (0, 1):
        play.end_group(group)
    play.switch()
    play.finish_step()
    out = play.answer(cmd.Publish)
    assert [c.version for c in out if isinstance(c, cmd.Dispatch)] == [1, 1]
    assert sorted(c.cell for c in out if isinstance(c, cmd.ReturnToRollout)) == [0, 1]
    play.switch()
    assert all(play.state_of(cell) is CellState.ROLLOUT for cell in range(3))


def test_core_stays_when_data_is_ready_and_the_rest_covers_what_is_dispatched():
    play = Play(**SMALL)
    for group in range(4):
        play.end_group(group)
    play.switch()
    play.finish_step()
    out = play.answer(cmd.Publish)
    assert 0 not in [c.cell for c in out if isinstance(c, cmd.ReturnToRollout)]
    assert [c.step for c in out if isinstance(c, cmd.OpenStep)] == [1]


def test_two_way_gives_back_only_the_cells_that_are_needed():
    play = Play(**SMALL, two_way=True)
    for group in range(4):
        play.end_group(group, ["a", "b", "c"])
    play.switch()
    assert play.state_of(2) is CellState.TRAINING
    play.finish_step()
    out = play.answer(cmd.Publish)
    assert [c.cell for c in out if isinstance(c, cmd.ReturnToRollout)] == [2]


@pytest.mark.parametrize(("backlog", "returned"), [(0.0, [1, 2]), (0.5, [2])])
def test_backlog_keeps_cells_whose_executions_can_wait_for_a_slot(backlog: float, returned: list[int]):
    play = Play(**{**SMALL, "slots_per_cell": 1}, two_way=True, backlog=backlog)
    for group in range(4):
        play.end_group(group, ["a", "b", "c"])
    play.switch()
    play.finish_step()
    out = play.answer(cmd.Publish)
    assert [c.cell for c in out if isinstance(c, cmd.ReturnToRollout)] == returned


def test_backlog_never_keeps_the_last_server_from_those_who_wait():
    play = Play(**SMALL, two_way=True, backlog=100.0)
    for group in range(4):
        play.end_group(group, ["a", "b", "c"])
    play.switch()
    assert all(play.state_of(cell) is CellState.TRAINING for cell in range(3))
    play.finish_step()
    out = play.answer(cmd.Publish)
    assert [c.cell for c in out if isinstance(c, cmd.ReturnToRollout)] == [2]


def test_longest_first_starts_the_longest_of_a_publish_first_and_the_unknown_as_the_mean():
    scheduler = Scheduler(
        SchedulerConfig(
            num_cells=2, slots_per_cell=1, steps=8, groups_per_step=4, executions_per_group=2, steps_per_burst=1,
            dispatch_depth=0.0, order="longest-first",
        )
    )  # fmt: skip
    scheduler.handle(ev.Foreseen(0.0, 0, (1.0, 0.0, 2.0, 9.0)))
    commands = scheduler.handle(ev.RunStarted(at=0.0))
    dispatched = [c.group for c in commands if isinstance(c, cmd.Dispatch)]
    waiting = [live.execution for live in scheduler.state.placement.queue]
    started = [c.execution for c in commands if isinstance(c, cmd.Start)]
    groups = [int(name[1:7]) for name in (*started, *waiting)]
    assert dispatched == [0, 1, 2, 3] and groups == [3, 3, 1, 1, 2, 2, 0, 0]
    scheduler.validate()


def retuned(at: float, mu: int, phi: float) -> ev.Retuned:
    return ev.Retuned(at, mu, phi, two_way=True, backlog=0.0, reason="told")


def test_a_plan_holds_from_the_next_publish_on():
    play = Play(**{**SMALL, "steps_per_burst": 2, "dispatch_depth": 0.0}, max_staleness=3, tune=True)
    before = play.scheduler.config.num_groups_due(0)
    play.send(retuned(play.now(), 1, 3.0))
    assert play.scheduler.state.num_train_groups == before and play.scheduler.planned != play.scheduler.config
    for group in range(4):
        play.end_group(group)
    play.switch()
    play.finish_step()
    assert play.said(cmd.Publish), "a burst of two steps ends after one"
    play.answer(cmd.Publish)
    config = play.scheduler.config
    assert (config.steps_per_burst, config.dispatch_depth) == (1, 3.0)
    assert play.scheduler.state.num_train_groups == config.num_groups_due(1)


def test_a_longer_burst_waits_for_the_groups_that_it_needs():
    play = Play(**{**SMALL, "steps_per_burst": 1, "steps": 8}, max_staleness=3, tune=True)
    play.send(retuned(play.now(), 3, 1.0))
    for group in range(play.scheduler.state.num_train_groups):
        play.end_group(group)
    play.switch()
    play.finish_step()
    assert play.said(cmd.Publish), "the burst that was dispatched ends where it was to end"
    play.answer(cmd.Publish)
    assert play.scheduler.state.burst_end == 4


def test_a_plan_beyond_the_cap_on_staleness_is_refused():
    play = Play(**SMALL, max_staleness=2, tune=True)
    with pytest.raises(ValueError, match="cannot be kept with 4 steps"):
        play.scheduler.handle(retuned(play.now(), 2, 2.0))


def test_a_run_that_is_not_tuned_hears_no_plan():
    with pytest.raises(IllegalTransition):
        Play(**SMALL).scheduler.handle(retuned(1.0, 1, 1.0))


def test_cell_in_transit_at_the_boundary_finishes_its_switch_and_turns_round():
    play = Play(**SMALL)
    play.end_group(0, ["a", "b"])
    play.end_group(1, ["c"])
    play.answer(cmd.Drain, 0)
    play.answer(cmd.SwitchToTraining, 0)
    play.answer(cmd.OpenStep)
    assert play.state_of(1) is CellState.DRAINING
    play.finish_step()
    play.answer(cmd.Publish)
    play.answer(cmd.Drain, 1)
    out = play.answer(cmd.SwitchToTraining, 1)
    assert [type(c) for c in out] == [cmd.ReturnToRollout] and play.state_of(1) is CellState.TO_ROLLOUT


def test_join_window_shuts_at_the_optimizer_of_the_last_step_of_a_burst():
    play = Play(**SMALL)
    for group in range(4):
        play.end_group(group, ["a"])
    play.answer(cmd.Drain, 0)
    play.answer(cmd.SwitchToTraining, 0)
    play.answer(cmd.OpenStep)
    num = len(play.said(cmd.Drain))
    play.answer(cmd.Drain, 1)
    play.answer_all(cmd.OpenStep, cmd.Compute, cmd.CloseStep)
    play.answer(cmd.SwitchToTraining, 1)
    assert len(play.said(cmd.Drain)) == num, "work of the next burst draws nobody now"
    assert not play.said(cmd.JoinStep)


def test_colocate_waits_for_the_last_execution_and_switches_all_cells_together():
    play = Play(**SMALL, policy="colocate")
    for group in range(3):
        play.end_group(group)
    assert not play.said(cmd.Drain)
    play.end_group(3)
    assert [c.cell for c in play.said(cmd.Drain)] == [0, 1, 2]
    play.switch()
    play.answer_all(cmd.OpenStep, cmd.JoinStep)
    assert len(play.scheduler.state.training.members) == 3


def test_colocate_with_standalone_engines_leaves_when_they_can_serve_the_rest():
    play = Play(**SMALL, policy="colocate", num_standalone=1, slots_per_standalone=2)
    play.end_group(0)
    play.end_group(1)
    assert [c.cell for c in play.said(cmd.Drain)] == [0, 1, 2]
    assert {move.server for c in play.said(cmd.Drain) for move in c.moves} <= {"standalone-0"}


def test_without_streaming_a_step_takes_all_its_groups_at_once():
    play = Play(**SMALL, policy="async", training_cells=1)
    play.switch()
    play.end_group(0)
    assert not play.said(cmd.OpenStep)
    play.end_group(1)
    assert play.said(cmd.OpenStep)


def test_async_never_moves_a_cell_after_the_start():
    play = Play(**SMALL, policy="async", training_cells=2)
    assert [c.cell for c in play.said(cmd.Drain)] == [0, 1]
    assert {c.server for c in play.said(cmd.Start)} == {"cell-2"}
    play.switch()
    for group in range(2):
        play.end_group(group)
    play.finish_step()
    play.answer(cmd.Publish)
    assert not play.said(cmd.ReturnToRollout)


def test_hard_cap_keeps_room_for_groups_that_may_not_wait():
    play = Play(**{**SMALL, "max_staleness": 1, "steps": 3})
    play.end_group(1, [])
    play.end_group(2, [])
    play.switch()
    play.finish_step()
    play.answer(cmd.Publish)
    play.switch()
    play.end_group(4)
    play.end_group(5)
    play.switch()
    assert [c.group for c in play.said(cmd.TakeGroup)] == [1, 2], "groups 0 and 3, of version 0, have to be in step 1"
    play.end_group(3)
    play.end_group(0)
    play.switch()
    play.finish_step()
    assert [(c.group, c.staleness) for c in play.said(cmd.TakeGroup)][2:] == [(0, 1), (3, 1)]


def test_hard_cap_keeps_room_in_later_steps_for_groups_that_are_due_then():
    """Groups 0, 1, 2 are of version 0, hence due by step 2. If step 1 took group 3, steps 1 and 2 had no room for both 1 and 2."""
    play = Play(
        num_cells=3, slots_per_cell=4, steps=6, groups_per_step=1, executions_per_group=1, steps_per_burst=1, dispatch_depth=2.0,
        max_staleness=2,
    )  # fmt: skip
    play.end_group(0)
    play.switch()
    play.finish_step()
    play.answer(cmd.Publish)
    play.end_group(3)
    play.switch()
    assert [c.group for c in play.said(cmd.TakeGroup)] == [0], "group 3 is ready and has to wait"
    play.end_group(2)
    play.switch()
    play.finish_step()
    play.answer(cmd.Publish)
    play.end_group(1)
    play.switch()
    play.finish_step()
    assert [(c.group, c.staleness) for c in play.said(cmd.TakeGroup)] == [(0, 0), (2, 1), (1, 2)]


def test_without_a_cap_a_slow_group_may_wait():
    play = Play(**{**SMALL, "steps": 3})
    play.end_group(1, [])
    play.end_group(2, [])
    play.switch()
    play.finish_step()
    play.answer(cmd.Publish)
    play.switch()
    play.end_group(4)
    play.end_group(5)
    play.switch()
    play.finish_step()
    assert [c.group for c in play.said(cmd.TakeGroup)] == [1, 2, 4, 5]


def test_evaluations_come_at_boundaries_count_in_the_waterlevel_and_are_not_trained():
    play = Play(**SMALL, evaluate_at_start=True, evaluation_every_steps=2, evaluate_at_end=True, evaluation_group_sizes=(2, 1))
    assert [(c.kind, c.num_executions) for c in play.said(cmd.Dispatch)][:2] == [("evaluation", 2), ("evaluation", 1)]
    assert play.scheduler.state.waterlevel == 7
    play.end("e000000-0", "e000000-1")
    out = play.end("e000001-0")
    assert [(c.version, c.groups) for c in out if isinstance(c, cmd.ReportEvaluation)] == [(0, (0, 1))]
    assert not play.said(cmd.PrepareGroup)


def test_run_finishes_after_the_last_publish_and_the_last_evaluation():
    play = Play(**{**SMALL, "steps": 1}, evaluate_at_end=True, evaluation_group_sizes=(1,))
    for group in range(2):
        play.end_group(group)
    play.switch()
    play.finish_step()
    out = play.answer(cmd.Publish)
    assert not any(isinstance(c, cmd.FinishRun) for c in out)
    play.switch()
    assert [type(c) for c in play.end("e000002-0")] == [cmd.ReportEvaluation, cmd.FinishRun]


def test_impossible_events_are_refused_with_the_story():
    play = Play(**SMALL)
    with pytest.raises(IllegalTransition, match="cell 1 is"):
        play.scheduler.handle(ev.CellReturned(1.0, 1))
    with pytest.raises(IllegalTransition, match="ended or unknown"):
        play.scheduler.handle(ev.ExecutionEnded(1.0, "e000099-0", 0))
    with pytest.raises(IllegalTransition, match="the run is started"):
        play.scheduler.handle(ev.RunStarted(2.0))


def test_execution_ends_once():
    play = Play(**SMALL)
    play.end("e000000-0")
    with pytest.raises(IllegalTransition):
        play.scheduler.handle(ev.ExecutionEnded(9.0, "e000000-0", 0))


def test_a_run_that_is_done_is_made_longer():
    driver = RandomDriver(SchedulerConfig(**SMALL), np.random.default_rng(3), fault_rate=0.0)
    driver.run()
    scheduler, before = driver.scheduler, driver.scheduler.state.num_train_groups
    steps = scheduler.config.steps
    out = scheduler.handle(ev.Reconfigured(float(len(driver.events)), steps=steps + 1, steps_per_burst=2))
    assert (scheduler.config.steps, scheduler.config.steps_per_burst, scheduler.state.burst_end) == (steps + 1, 2, steps + 1)
    assert [c.version for c in out if isinstance(c, cmd.Dispatch)] == [steps] * SMALL["groups_per_step"]
    assert scheduler.state.num_train_groups == before + SMALL["groups_per_step"] and not scheduler.state.is_finished


def test_what_changes_during_a_burst_waits_for_its_publish_and_steps_do_not():
    play = Play(**{**SMALL, "steps": 4, "steps_per_burst": 2, "dispatch_depth": 0.0})
    before = play.scheduler.state.num_train_groups
    play.send(ev.Reconfigured(play.now(), steps=6, steps_per_burst=3, evaluation_every_steps=0))
    assert (play.scheduler.config.steps, play.scheduler.config.steps_per_burst) == (6, 2)
    assert (play.scheduler.planned.steps, play.scheduler.planned.steps_per_burst) == (6, 3)
    assert (play.scheduler.state.num_train_groups, play.scheduler.state.burst_end) == (before, 2)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"steps": 1}, "groups of 2 steps are dispatched already"),
        ({"steps": 0}, "does not become"),
        ({"backlog": 1.0}, "no effect without two_way"),
        ({"steps_per_burst": 9}, "max_staleness"),
    ],
)
def test_a_change_that_a_run_cannot_take_has_a_reason_and_changes_nothing(changes, reason):
    play = Play(**{**SMALL, "steps": 4, "steps_per_burst": 2, "dispatch_depth": 0.0}, max_staleness=3)
    config = play.scheduler.planned
    assert reason in play.scheduler.cannot_change(changes)
    with pytest.raises(ValueError, match=reason):
        play.send(ev.Reconfigured(play.now(), **changes))
    assert play.scheduler.planned == config
