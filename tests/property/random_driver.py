"""A driver that answers the scheduler's commands in random order and loses anything at any moment."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
from msgspec import UNSET

from qwengyre.core.ids import CORE, CellId
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler

ANSWER = {
    cmd.Drain: ev.CellDrained,
    cmd.SwitchToTraining: ev.CellInTraining,
    cmd.ReturnToRollout: ev.CellInRollout,
    cmd.JoinStep: ev.StepJoined,
    cmd.Compute: ev.MicroStepDone,
    cmd.OpenStep: ev.StepOpened,
    cmd.CloseStep: ev.StepReduced,
    cmd.RunOptimizer: ev.StepDone,
    cmd.Publish: ev.Published,
}
RETUNE_RATE = 0.05
CHANGE_RATE = 0.02
WITH_CELL = (ev.CellDrained, ev.CellInTraining, ev.CellInRollout, ev.StepJoined, ev.MicroStepDone)


class RandomDriver:
    """Keeps every command that awaits an answer, answers one at random, sometimes breaks something instead.

    Answers of processes that died meanwhile are sometimes delivered all the same: the scheduler has to ignore them.
    """

    def __init__(
        self, config: SchedulerConfig, rng: np.random.Generator, fault_rate: float, num_changes: int = 0, end_rate: float = 1.0
    ):
        self.num_changes = num_changes
        """How often its user changes the config at most: during the run, and once more when it was done."""
        self.scheduler = Scheduler(config)
        self.rng, self.fault_rate, self.end_rate = rng, fault_rate, end_rate
        """`end_rate` below 1: executions are slow beside all else, so that steps have to wait for groups."""
        self.pending: list[cmd.Command] = []
        self.running: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.dispatched: set[str] = set()
        self.core_step = 0
        self.durable_step = 0
        self.is_finished = False
        self.events: list[ev.Event] = []
        self.commands: list[list[cmd.Command]] = []

    def run(self, max_events: int = 100_000) -> None:
        """Drive to the end of the run, checking every invariant after every event."""
        self._send(ev.RunStarted(at=0.0))
        while not self.is_finished:
            assert len(self.events) < max_events, "the run does not end"
            at = float(len(self.events))
            if self.scheduler.config.tune and self.rng.random() < RETUNE_RATE:
                self._send(random_plan(self.scheduler.config, self.rng, at))
                continue
            if self.scheduler.planned.wants_foresight and self.rng.random() < RETUNE_RATE:
                first = self.scheduler.state.num_train_groups
                self._send(ev.Foreseen(at, first, tuple(self.rng.choice([0.0, 1.0, 2.0, 9.0], size=4).tolist())))
                continue
            if self.num_changes and self.rng.random() < CHANGE_RATE:
                self._change(at)
                continue
            fault = self._fault(at) if self.rng.random() < self.fault_rate else None
            if fault is None:
                fault = self._answer(at)
            if fault is None:
                fault = self._repair(at)
            assert fault is not None, f"stuck: {self.scheduler.awaited()}"
            self._send(fault)
            if self.is_finished and self.num_changes and self.scheduler.config.steps:
                self.is_finished = not self._change(float(len(self.events)), at_least=self.scheduler.config.steps + 1)
        assert self.ended.keys() == self.dispatched and set(self.ended.values()) <= {1}

    def _change(self, at: float, at_least: int = 0) -> bool:
        """The user changes the config, if the run can still take what comes to his mind; whether it could."""
        self.num_changes -= 1
        event = random_change(self.scheduler, self.rng, at, at_least)
        can = not self.scheduler.cannot_change(event.changes())
        if can:
            self._send(event)
        return can

    def _send(self, event: ev.Event) -> None:
        out = self.scheduler.handle(event)
        self.scheduler.validate()
        self.events.append(event)
        self.commands.append(out)
        for command in out:
            self._take(command)

    def _take(self, command: cmd.Command) -> None:
        match command:
            case cmd.Start(execution, attempt, _):
                self.running[execution] = attempt
            case cmd.Dispatch(group, _, _, num):
                self.dispatched |= {f"e{group:06d}-{i}" for i in range(num)}
            case cmd.Publish(_, version):
                assert version >= self.durable_step
                self.pending.append(command)
            case cmd.FinishRun():
                self.is_finished = True
            case cmd.PrepareGroup() | cmd.Drain():
                self.pending.append(command)
            case _ if type(command) in ANSWER:
                self.pending.append(command)

    def _answer(self, at: float) -> ev.Event | None:
        num = len(self.pending) + min(len(self.running), 4)
        if not num:
            return None
        index = int(self.rng.integers(num))
        if self.pending and self.end_rate < 1 and self.rng.random() > self.end_rate:
            index = int(self.rng.integers(len(self.pending)))
        if index >= len(self.pending):
            return self._end(at)
        self.pending[index], self.pending[-1] = self.pending[-1], self.pending[index]
        command = self.pending.pop()
        if isinstance(command, cmd.PrepareGroup):
            num_micro_steps = int(self.rng.integers(0, 5))
            micro_steps = tuple(f"m{command.group}-{i}" for i in range(num_micro_steps))
            return ev.GroupReady(at, group=command.group, micro_steps=micro_steps, num_valid=int(self.rng.integers(0, 5)))
        if isinstance(command, cmd.Publish):
            self.durable_step = max(self.durable_step, command.version)
        if isinstance(command, cmd.RunOptimizer) and command.ticket in self.scheduler.state.awaited:
            self.core_step = command.step + 1
        kind = ANSWER[type(command)]
        return kind(at, command.ticket, command.cell) if kind in WITH_CELL else kind(at, command.ticket)

    def _end(self, at: float) -> ev.Event:
        executions = sorted(self.running)
        execution = executions[int(self.rng.integers(len(executions)))]
        if self.rng.random() < self.fault_rate:
            attempt = self.running.pop(execution)
            return ev.ExecutionLost(at, execution, attempt)
        self.ended[execution] += 1
        return ev.ExecutionEnded(at, execution, self.running.pop(execution))

    def _fault(self, at: float) -> ev.Event | None:
        state = self.scheduler.state
        kind = int(self.rng.integers(4))
        if kind == 0:
            return self._repair(at)
        if kind == 1 and state.standalone_alive:
            index = int(self.rng.integers(len(state.standalone_alive)))
            return ev.StandaloneLost(at, index) if state.standalone_alive[index] else ev.StandaloneReturned(at, index)
        if kind == 2 and self.core_step > self.durable_step:
            self.durable_step = self.core_step
            return ev.CheckpointSaved(at, self.durable_step)
        cell = state.cells.all[int(self.rng.integers(len(state.cells.all)))]
        if cell.state is CellState.LOST:
            return None
        self._forget(cell.cell)
        return ev.CellLost(at, cell.cell)

    def _forget(self, cell: CellId) -> None:
        """Drop most of what a dead process would have answered."""
        keep = self.rng.random() < 0.3
        of_core = (cmd.OpenStep, cmd.CloseStep, cmd.RunOptimizer, cmd.Publish)
        self.pending = [
            c
            for c in self.pending
            if (keep and not isinstance(c, cmd.Publish))
            or not (getattr(c, "cell", None) == cell or (cell == CORE and isinstance(c, of_core)))
        ]

    def _repair(self, at: float) -> ev.Event | None:
        state = self.scheduler.state
        lost = [c.cell for c in state.cells.all if c.state is CellState.LOST]
        if lost:
            cell = lost[int(self.rng.integers(len(lost)))]
            if cell == CORE:
                self.core_step = self.durable_step
            return ev.CellReturned(at, cell, self.durable_step if cell == CORE else None)
        dead = [i for i, is_alive in enumerate(state.standalone_alive) if not is_alive]
        return ev.StandaloneReturned(at, dead[0]) if dead else None


def random_config(rng: np.random.Generator) -> SchedulerConfig:
    policy = str(rng.choice(["elastic", "elastic", "colocate", "async"]))
    num_cells = int(rng.integers(2 if policy == "async" else 1, 7))
    mu, phi = int(rng.integers(1, 4)), float(rng.choice([0.0, 0.3, 0.5, 1.0, 2.0]))
    two_way = bool(rng.integers(2))
    max_staleness = (
        None
        if rng.random() < 0.5
        else math.ceil(mu + phi) - int(rng.integers(2))
        if mu + phi == int(mu + phi)
        else math.ceil(mu + phi)
    )
    return SchedulerConfig(
        policy=policy,
        num_cells=num_cells,
        slots_per_cell=int(rng.integers(1, 9)),
        num_standalone=int(rng.integers(0, 3)),
        slots_per_standalone=int(rng.integers(1, 9)),
        training_cells=int(rng.integers(1, max(2, num_cells))),
        streaming=[None, True, False][int(rng.integers(3))],
        steps=int(rng.integers(0, 9)),
        groups_per_step=int(rng.integers(1, 5)),
        executions_per_group=int(rng.integers(1, 5)),
        steps_per_burst=mu,
        dispatch_depth=phi,
        max_staleness=max_staleness,
        two_way=two_way,
        backlog=random_backlog(rng) if two_way and policy == "elastic" else 0.0,
        tune=policy == "elastic" and max_staleness is not None and bool(rng.integers(2)),
        leave_only_for_work=bool(rng.integers(2)),
        evaluation_every_steps=int(rng.integers(0, 4)),
        evaluate_at_start=bool(rng.integers(2)),
        evaluate_at_end=bool(rng.integers(2)),
        evaluation_group_sizes=(2, 1),
        order=str(rng.choice(["dispatch", "longest-first"])),
    )


def random_backlog(rng: np.random.Generator) -> float:
    return float(rng.choice([0.0, 0.0, 0.5, 1.0, 3.0]))


def random_plan(config: SchedulerConfig, rng: np.random.Generator, at: float) -> ev.Retuned:
    """Any plan within the cap on staleness: phi + mu <= D + 1."""
    assert config.max_staleness is not None
    depth = config.max_staleness + 1
    mu = int(rng.integers(1, depth + 1))
    phi = float(rng.choice([0.0, 0.5, 1.0])) * (depth - mu)
    two_way = bool(rng.integers(2))
    backlog = random_backlog(rng) if two_way else 0.0
    return ev.Retuned(at, mu, phi, two_way, backlog, "at random", ("dispatch", "longest-first", UNSET)[rng.integers(3)])


def random_change(scheduler: Scheduler, rng: np.random.Generator, at: float, at_least: int) -> ev.Reconfigured:
    """Some keys of those that may change, to values that may be refused."""
    now, steps = scheduler.config, int(rng.integers(0, 5))
    values = {
        "steps": at_least + steps if at_least else max(0, now.steps + steps - 2),
        "steps_per_burst": int(rng.integers(1, 4)),
        "dispatch_depth": float(rng.choice([0.0, 0.5, 1.0, 2.0])),
        "two_way": bool(rng.integers(2)),
        "backlog": random_backlog(rng),
        "evaluation_every_steps": int(rng.integers(0, 4)),
        "evaluate_at_end": bool(rng.integers(2)),
    }
    chosen = [name for name in values if rng.random() < 0.4 or (name == "steps" and at_least)]
    return ev.Reconfigured(at, **{name: values[name] for name in chosen})


def replay(config: SchedulerConfig, journal: list[bytes]) -> list[bytes]:
    """Feed a journal of encoded events to a new scheduler; return the encoded commands of each."""
    decoder = msgspec.msgpack.Decoder(ev.AnyEvent)
    scheduler = Scheduler(config)
    return [msgspec.msgpack.encode(scheduler.handle(decoder.decode(event))) for event in journal]
