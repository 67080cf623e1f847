"""Policies of other systems that no run of ours uses, for the simulator alone. How each was read: docs/rivals.md."""

from __future__ import annotations

from typing import ClassVar

from qwengyre.scheduler.cells import Cell
from qwengyre.scheduler.policies import next_in_line
from qwengyre.scheduler.state import State


class Toggle:
    """The whole pool trains as soon as a step has its groups, and rolls out in between. Unfinished executions pause meanwhile."""

    pauses: ClassVar[bool] = True

    def serves(self, state: State, cell: Cell) -> bool:
        return True

    def leavers(self, state: State) -> list[Cell]:
        return state.cells.in_rollout() if next_in_line(state) is not None else []

    def num_kept(self, state: State) -> int:
        """All go on if the next step has its groups already."""
        return len(state.cells.prefix) if state.has_data and state.num_steps_to_open > 0 else 0
