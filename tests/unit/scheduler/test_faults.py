"""Losses in every phase: what goes back, who is held, what is restored."""

from __future__ import annotations

import pytest

from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.scheduler.training import StepState
from tests.unit.scheduler.play import Play

SMALL = dict(
    num_cells=3,
    slots_per_cell=2,
    steps=4,
    groups_per_step=2,
    executions_per_group=1,
    steps_per_burst=2,
    dispatch_depth=0.0,
)


def in_step(**config: object) -> Play:
    """Core and satellite 1 are members; a, b, c, d are the step's micro-steps, a and b claimed."""
    play = Play(**{**SMALL, **config})
    play.end_group(0, ["a", "b"])
    play.end_group(1, ["c", "d"])
    while play.state_of(1) is not CellState.TRAINING:
        play.answer((cmd.Drain, cmd.SwitchToTraining, cmd.OpenStep))
    play.answer_all(cmd.OpenStep, cmd.JoinStep)
    return play


def test_claims_and_computed_micro_steps_of_a_lost_satellite_go_back_to_their_places():
    play = in_step()
    play.answer(cmd.Compute, 1)
    assert [c.micro_step for c in play.said(cmd.Compute)] == ["a", "b", "c"]
    out = play.send(ev.CellLost(play.now(), 1))
    assert [c.epoch for c in out if isinstance(c, cmd.Regroup)] == [1]
    assert play.scheduler.state.training.queue.waiting() == ["b", "c", "d"]
    play.pending = [c for c in play.pending if getattr(c, "cell", None) != 1]
    out = play.answer(cmd.Compute, 0)
    assert [c.micro_step for c in out if isinstance(c, cmd.Compute)] == ["b"]


def test_member_lost_while_reducing_reopens_the_step_and_the_old_reduction_is_void():
    play = in_step()
    play.answer_all(cmd.JoinStep, cmd.Compute)
    void = play.take(cmd.CloseStep)
    assert 1 in void.members
    play.send(ev.CellLost(play.now(), 1))
    assert play.scheduler.state.training.state is StepState.OPEN
    assert play.send(play.answer_to(void)) == []
    assert play.scheduler.state.training.state is StepState.OPEN
    play.pending = [c for c in play.pending if getattr(c, "cell", None) != 1]
    play.answer_all(cmd.JoinStep, cmd.Compute)
    again = play.take(cmd.CloseStep)
    assert again.epoch == 1 and 1 not in again.members and again.step == void.step


def test_member_lost_after_the_commit_changes_nothing_of_the_step():
    play = in_step()
    play.answer_all(cmd.JoinStep, cmd.Compute)
    play.answer(cmd.CloseStep)
    play.send(ev.CellLost(play.now(), 1))
    assert play.scheduler.state.training.state is StepState.OPTIMIZING
    play.answer(cmd.RunOptimizer)
    assert play.scheduler.state.steps_done == 1


def test_core_lost_in_a_step_restarts_it_with_the_same_groups():
    play = in_step()
    play.answer(cmd.Compute, 1)
    late = play.take(cmd.Compute, 1)
    out = play.send(ev.CellLost(play.now(), 0))
    assert 1 in [c.cell for c in out if isinstance(c, cmd.ReturnToRollout)]
    assert play.scheduler.state.groups.num_ready == 2
    assert play.send(play.answer_to(late)) == [], "a micro-step of the abandoned step is ignored"
    play.pending = [c for c in play.pending if isinstance(c, cmd.ReturnToRollout)]
    play.switch()
    play.send(ev.CellReturned(play.now(), 0, step=0))
    play.switch()
    play.finish_step()
    assert [c.group for c in play.said(cmd.TakeGroup)] == [0, 1, 0, 1]
    assert play.scheduler.state.steps_done == 1


def test_core_restored_from_an_older_checkpoint_trains_the_later_steps_again():
    play = in_step()
    play.answer_all(cmd.JoinStep, cmd.Compute)
    play.answer(cmd.CloseStep)
    play.answer(cmd.RunOptimizer)
    assert play.scheduler.state.steps_done == 1
    play.send(ev.CellLost(play.now(), 0))
    play.pending = [c for c in play.pending if isinstance(c, cmd.ReturnToRollout)]
    play.switch()
    play.send(ev.CellReturned(play.now(), 0, step=0))
    assert play.scheduler.state.steps_done == 0 and play.scheduler.state.groups.num_ready == 2


def test_checkpoint_keeps_a_step_from_being_trained_again():
    play = in_step()
    play.answer_all(cmd.JoinStep, cmd.Compute)
    play.answer(cmd.CloseStep)
    play.answer(cmd.RunOptimizer)
    play.send(ev.CheckpointSaved(play.now(), step=1))
    play.send(ev.CellLost(play.now(), 0))
    play.pending = [c for c in play.pending if isinstance(c, cmd.ReturnToRollout)]
    play.switch()
    with pytest.raises(ValueError, match="step 1 is durable"):
        play.scheduler.handle(ev.CellReturned(play.now(), 0, step=0))


def test_core_lost_while_its_optimizer_runs_may_come_back_after_the_step():
    play = in_step()
    play.answer_all(cmd.JoinStep, cmd.Compute)
    play.answer(cmd.CloseStep)
    play.send(ev.CheckpointSaved(play.now(), step=1))
    play.send(ev.CellLost(play.now(), 0))
    play.pending = [c for c in play.pending if isinstance(c, cmd.ReturnToRollout)]
    play.switch()
    play.send(ev.CellReturned(play.now(), 0, step=1))
    assert play.scheduler.state.steps_done == 1 and play.scheduler.state.groups.num_ready == 0


def test_core_lost_while_publishing_publishes_again():
    play = Play(**{**SMALL, "steps_per_burst": 1, "dispatch_depth": 1.0})
    play.end_group(0)
    play.end_group(1)
    play.switch()
    play.finish_step()
    lost = play.take(cmd.Publish)
    play.send(ev.CheckpointSaved(play.now(), step=1))
    play.send(ev.CellLost(play.now(), 0))
    assert play.send(play.answer_to(lost)) == []
    play.switch()
    out = play.send(ev.CellReturned(play.now(), 0, step=1))
    assert [c.version for c in out if isinstance(c, cmd.Publish)] == [1]
    play.answer(cmd.Publish)
    assert play.scheduler.state.version == 1


def test_satellite_that_comes_back_is_last_in_the_order():
    play = Play(**SMALL)
    play.send(ev.CellLost(play.now(), 1))
    out = play.send(ev.CellReturned(play.now(), 1))
    assert [c for c in out if isinstance(c, cmd.Regroup)] == [cmd.Regroup(epoch=2, order=(0, 2, 1))]


def test_executions_of_a_lost_cell_are_routed_held_and_routed_again():
    play = Play(**{**SMALL, "num_cells": 2})
    assert play.scheduler.state.waterlevel == 4
    play.send(ev.CellLost(play.now(), 1))
    held = [c.execution for c in play.said(cmd.Hold)]
    assert len(held) == 2 and list(play.scheduler.state.placement.held) == held
    free = next(c.execution for c in play.said(cmd.Start) if c.server == "cell-0")
    out = play.end(free)
    assert [(c.execution, c.server) for c in out if isinstance(c, cmd.Route)] == [(held[0], "cell-0")]
    assert not play.said(cmd.Drain), "nobody leaves until w fits again"


def test_held_execution_may_end():
    play = Play(**{**SMALL, "num_cells": 2})
    play.send(ev.CellLost(play.now(), 1))
    held = play.said(cmd.Hold)[0].execution
    play.end(held)
    assert held not in play.scheduler.state.placement.live


def test_cell_lost_in_transit_frees_the_next():
    play = Play(**SMALL)
    play.end_group(0, ["a", "b"])
    play.end_group(1)
    play.answer(cmd.Drain, 0)
    play.answer(cmd.SwitchToTraining, 0)
    play.answer(cmd.OpenStep)
    play.end_group(2)
    play.end_group(3)
    assert play.state_of(1) is CellState.DRAINING
    out = play.send(ev.CellLost(play.now(), 1))
    assert [c.cell for c in out if isinstance(c, cmd.Drain)] == [2]


def test_late_answers_of_a_dead_cell_are_ignored():
    play = Play(**SMALL)
    play.end_group(0)
    play.end_group(1)
    late = play.take(cmd.Drain, 0)
    play.send(ev.CellLost(play.now(), 0))
    play.send(ev.CellReturned(play.now(), 0, step=0))
    play.send(play.answer_to(late))
    assert play.state_of(0) is CellState.DRAINING, "it is the second Drain that is awaited"


def test_lost_execution_starts_again_before_all_others_with_the_next_attempt():
    play = Play(**{**SMALL, "num_cells": 1})
    out = play.send(ev.ExecutionLost(play.now(), "e000001-0", 0))
    assert [(c.execution, c.attempt) for c in out if isinstance(c, cmd.Start)] == [("e000001-0", 1)]
    assert play.send(ev.ExecutionLost(play.now(), "e000001-0", 0)) == [], "an old attempt"
    assert play.send(ev.ExecutionEnded(play.now(), "e000001-0", 0)) == [], "an old attempt"


def test_lost_standalone_engine_hands_over_and_serves_again():
    play = Play(**SMALL, num_standalone=1, slots_per_standalone=3)
    before = play.scheduler.state.capacity
    out = play.send(ev.StandaloneLost(play.now(), 0))
    assert any(isinstance(c, cmd.Route) for c in out) and play.scheduler.state.capacity == before - 3
    play.send(ev.StandaloneReturned(play.now(), 0))
    assert play.scheduler.state.capacity == before


def test_awaited_lists_what_a_restarted_driver_has_to_take_up():
    play = Play(**SMALL)
    play.end(*[name for name in sorted(play.running) if name.startswith("e000000")])
    assert cmd.PrepareGroup(0) in play.scheduler.awaited()


def test_async_keeps_satellites_in_training_while_the_core_comes_back():
    play = Play(**{**SMALL, "num_cells": 4, "policy": "async", "training_cells": 2, "streaming": True})
    play.switch()
    play.end_group(0, ["a", "b"])
    play.answer_all(cmd.OpenStep, cmd.JoinStep)
    play.send(ev.CellLost(play.now(), 0))
    assert play.state_of(1) is CellState.TRAINING
    play.pending.clear()
    play.send(ev.CellReturned(play.now(), 0, step=0))
    play.switch()
    play.answer_all(cmd.OpenStep, cmd.JoinStep)
    assert set(play.scheduler.state.training.members) == {0, 1}


def test_whoever_dies_before_the_run_starts_serves_nothing_until_it_is_back():
    """Cells are up before the first checkpoint is written; one that dies in between is lost before RunStarted."""
    scheduler = Scheduler(SchedulerConfig(**SMALL, num_standalone=1))
    scheduler.handle(ev.CellLost(0.0, 1))
    scheduler.handle(ev.StandaloneLost(0.0, 0))
    out = scheduler.handle(ev.RunStarted(1.0))
    scheduler.validate()
    assert {command.server for command in out if isinstance(command, cmd.Start)} <= {"cell-0", "cell-2"}
    assert [command.order for command in out if isinstance(command, cmd.Regroup)] == [(0, 2)]
    scheduler.handle(ev.CellReturned(2.0, 1))
    scheduler.handle(ev.StandaloneReturned(2.0, 0))
    scheduler.validate()
    assert scheduler.state.capacity == scheduler.state.capacity_total
