"""Policies of other systems that no run of ours uses, for the simulator alone. How each was read: docs/rivals.md."""

from __future__ import annotations

from typing import ClassVar

from qwengyre.core.ids import CORE
from qwengyre.scheduler.cells import Cell, CellState
from qwengyre.scheduler.policies import is_join_window_open
from qwengyre.scheduler.state import State


class Toggle:
    """The whole pool trains as soon as a step has its groups, and rolls out in between. Unfinished executions pause meanwhile."""

    pauses: ClassVar[bool] = True

    def serves(self, state: State, cell: Cell) -> bool:
        return True

    def leavers(self, state: State) -> list[Cell]:
        if state.cells.num_in_transit or not is_join_window_open(state):
            return []
        cell = state.cells.next_to_leave()
        is_led = cell is not None and (state.has_data if cell.cell == CORE else state.cells.core.state is CellState.TRAINING)
        return state.cells.in_rollout() if is_led else []

    def num_kept(self, state: State) -> int:
        """All go on if the next step has its groups already."""
        return len(state.cells.prefix) if state.has_data and state.num_steps_to_open > 0 else 0
