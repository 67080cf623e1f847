"""Plays a scheduler by hand: sends events, answers one command at a time, checks the invariants after each."""

from __future__ import annotations

from collections.abc import Sequence

from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.cells import CellState
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from tests.property.random_driver import ANSWER, WITH_CELL

ROLE_SWITCHES = (cmd.Drain, cmd.SwitchToTraining, cmd.ReturnToRollout, cmd.OpenStep)


class Play:
    def __init__(self, **config: object):
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self.at = 0.0
        self.pending: list[cmd.Command] = []
        self.running: dict[str, int] = {}
        self.all: list[cmd.Command] = []
        self.send(ev.RunStarted(at=0.0))

    def send(self, event: ev.Event) -> list[cmd.Command]:
        out = self.scheduler.handle(event)
        self.scheduler.validate()
        self.all += out
        for command in out:
            if isinstance(command, cmd.Start):
                self.running[command.execution] = command.attempt
            elif type(command) in ANSWER or isinstance(command, cmd.PrepareGroup):
                self.pending.append(command)
        return out

    def now(self) -> float:
        self.at += 1.0
        return self.at

    def end(self, *executions: str) -> list[cmd.Command]:
        """End executions; returns what the last one led to."""
        out: list[cmd.Command] = []
        for execution in executions:
            out = self.send(ev.ExecutionEnded(self.now(), execution, self.running.pop(execution)))
        return out

    def end_group(self, group: int, micro_steps: Sequence[str] | None = None, num_valid: int = 1) -> list[cmd.Command]:
        """End all executions of a group and make it ready with the given micro-steps."""
        self.end(*[name for name in sorted(self.running) if int(name[1:7]) == group])
        self.take(cmd.PrepareGroup)
        names = [f"m{group}"] if micro_steps is None else micro_steps
        return self.send(ev.GroupReady(self.now(), group, tuple(names), num_valid))

    def take(self, kind: type, cell: int | None = None) -> cmd.Command:
        """Remove the first pending command of a kind."""
        found = next(c for c in self.pending if isinstance(c, kind) and (cell is None or c.cell == cell))
        self.pending.remove(found)
        return found

    def answer(self, kind: type, cell: int | None = None) -> list[cmd.Command]:
        return self.send(self.answer_to(self.take(kind, cell)))

    def answer_to(self, command: cmd.Command) -> ev.Event:
        event = ANSWER[type(command)]
        if event in WITH_CELL:
            return event(self.now(), command.ticket, command.cell)
        return event(self.now(), command.ticket)

    def answer_all(self, *kinds: type) -> None:
        """Answer commands of these kinds, and those that follow, until none is left."""
        while any(isinstance(c, kinds) for c in self.pending):
            self.answer(kinds)

    def switch(self) -> None:
        """Finish every role switch that is under way, and open the step."""
        self.answer_all(*ROLE_SWITCHES)

    def finish_step(self) -> None:
        """Answer everything up to the end of the open step."""
        self.answer_all(cmd.OpenStep, cmd.JoinStep, cmd.Compute, cmd.CloseStep)
        self.answer(cmd.RunOptimizer)

    def state_of(self, cell: int) -> CellState:
        return self.scheduler.state.cells.all[cell].state

    def said(self, kind: type) -> list[cmd.Command]:
        return [command for command in self.all if isinstance(command, kind)]
