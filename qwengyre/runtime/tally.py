"""Role switches and joins of a run, counted as the scheduler hears of them: live, or at a resume out of the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev


class Tally:
    def __init__(self) -> None:
        self.switches_to_training = 0
        self.switches_to_rollout = 0
        self.joins: Counter[int] = Counter()
        """By step, counted from 0: satellites that joined it after its first micro-step had been claimed."""
        self._claimed: set[int] = set()

    @property
    def joins_mid_step(self) -> int:
        return self.joins.total()

    def see(self, event: ev.Event, commands: Sequence[cmd.AnyCommand], steps_done: int) -> None:
        """`steps_done` by the scheduler, after it has heard `event` and decided `commands`."""
        match event:
            case ev.CellInTraining():
                self.switches_to_training += 1
            case ev.CellInRollout():
                self.switches_to_rollout += 1
            case ev.StepJoined() if steps_done in self._claimed:
                self.joins[steps_done] += 1
        for command in commands:
            match command:
                case cmd.OpenStep():  # perhaps again, after a loss of the core
                    self._claimed.discard(command.step)
                case cmd.Compute():
                    self._claimed.add(command.step)
