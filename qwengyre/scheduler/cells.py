"""Cells and their roles: one table, the order of leaving, the prefix that trains.

The order is fixed while nothing is lost: cell 0, the core, leaves first. A satellite that comes back after a loss goes to
the end of the order, so that the cells in training stay a prefix of it and communicator groups of prefixes are enough.
"""

from __future__ import annotations

import heapq
from enum import Enum
from typing import Final

from qwengyre.core.ids import CORE, CellId, ServerId, cell_server
from qwengyre.core.state_machine import advance
from qwengyre.scheduler.commands import Command, Drain, ReturnToRollout
from qwengyre.scheduler.events import CellDrained, CellInRollout, CellInTraining, CellLost, CellReturned, Event


class CellState(Enum):
    ROLLOUT = "rollout"
    DRAINING = "draining"
    TO_TRAINING = "to_training"
    TRAINING = "training"
    TO_ROLLOUT = "to_rollout"
    LOST = "lost"


CELL: Final[dict[tuple[CellState, type], CellState]] = {
    (CellState.ROLLOUT, Drain): CellState.DRAINING,
    (CellState.DRAINING, CellDrained): CellState.TO_TRAINING,
    (CellState.TO_TRAINING, CellInTraining): CellState.TRAINING,
    (CellState.TRAINING, ReturnToRollout): CellState.TO_ROLLOUT,
    (CellState.TO_ROLLOUT, CellInRollout): CellState.ROLLOUT,
    (CellState.ROLLOUT, CellLost): CellState.LOST,
    (CellState.DRAINING, CellLost): CellState.LOST,
    (CellState.TO_TRAINING, CellLost): CellState.LOST,
    (CellState.TRAINING, CellLost): CellState.LOST,
    (CellState.TO_ROLLOUT, CellLost): CellState.LOST,
    (CellState.LOST, CellReturned): CellState.ROLLOUT,
}

TRANSIT: Final = frozenset({CellState.DRAINING, CellState.TO_TRAINING, CellState.TO_ROLLOUT})


class Cell:
    """One cell. Its state changes through `Cells.advance` only."""

    __slots__ = ("cell", "is_turning", "rank", "server", "state", "ticket")

    def __init__(self, cell: int):
        self.cell = CellId(cell)
        self.server: ServerId = cell_server(cell)
        self.rank = cell
        """Place in the order of leaving."""
        self.state = CellState.ROLLOUT
        self.ticket = 0
        """The answer that its transition waits for."""
        self.is_turning = False
        """In transit to training when its burst ended: goes back as soon as it arrives."""


class Cells:
    """All cells, and which come next."""

    def __init__(self, num_cells: int):
        self.all = [Cell(cell) for cell in range(num_cells)]
        self.num_in_transit = 0
        self.num_alive = num_cells
        self.num_in_rollout = num_cells
        self.prefix: list[Cell] = []
        """Cells that left in this burst and have not turned round, in the order of leaving."""
        self._in_rollout = [(cell.rank, cell.cell) for cell in self.all]
        self._next_rank = num_cells

    @property
    def core(self) -> Cell:
        return self.all[CORE]

    def advance(self, cell: Cell, event: Event | Command) -> None:
        """Move a cell along the table; raises IllegalTransition."""
        before = cell.state
        cell.state = advance(CELL, f"cell {cell.cell}", before, event)
        self.num_in_transit += (cell.state in TRANSIT) - (before in TRANSIT)
        self.num_in_rollout += (cell.state is CellState.ROLLOUT) - (before is CellState.ROLLOUT)
        if cell.state is CellState.ROLLOUT:
            heapq.heappush(self._in_rollout, (cell.rank, cell.cell))

    def next_to_leave(self) -> Cell | None:
        """The first cell of the order that is in rollout; O(log cells)."""
        while self._in_rollout:
            rank, index = self._in_rollout[0]
            cell = self.all[index]
            if cell.state is CellState.ROLLOUT and cell.rank == rank:
                return cell
            heapq.heappop(self._in_rollout)
        return None

    def in_rollout(self) -> list[Cell]:
        """All cells in rollout, in the order of leaving."""
        return sorted((c for c in self.all if c.state is CellState.ROLLOUT), key=lambda c: c.rank)

    def lose(self, cell: Cell, event: CellLost) -> None:
        self.advance(cell, event)
        self.num_alive -= 1
        cell.is_turning = False
        if cell in self.prefix:
            self.prefix.remove(cell)

    def restore(self, cell: Cell, event: CellReturned) -> None:
        if cell.cell != CORE:
            cell.rank = self._next_rank
            self._next_rank += 1
        self.advance(cell, event)
        self.num_alive += 1

    def order(self) -> tuple[CellId, ...]:
        """The cells that live, in the order of leaving."""
        return tuple(c.cell for c in sorted(self.all, key=lambda c: c.rank) if c.state is not CellState.LOST)
