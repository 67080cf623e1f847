"""The policies: who leaves next, and how many stay in training at a boundary. Everything else is common to all.

Elastic is the paper's; the comparisons are Colocate and Async under the same dispatch.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

from qwengyre.core.ids import CORE
from qwengyre.scheduler.cells import Cell, CellState
from qwengyre.scheduler.state import State
from qwengyre.scheduler.training import StepState
from qwengyre.scheduler.traits import PolicyName


def may_leave(waterlevel: int, capacity: int, cell_share: int) -> bool:
    """Whether what stays can serve all unfinished work: w(t) <= C_R(t) - C_e (the paper, elastic scheduler).

    >>> may_leave(5, capacity=8, cell_share=4), may_leave(4, capacity=8, cell_share=4)
    (False, True)
    """
    return waterlevel <= capacity - cell_share


class Policy(Protocol):
    """Pure decisions over the state."""

    pauses: ClassVar[bool]
    """Cells leave whatever still runs on them; who finds no room elsewhere is held until they are back."""

    def serves(self, state: State, cell: Cell) -> bool:
        """Whether the cell takes executions when it is in rollout."""

    def leavers(self, state: State) -> list[Cell]:
        """The cells that leave for training now, in the order of leaving."""

    def num_kept(self, state: State) -> int:
        """How many of the prefix stay in training at a boundary; the coming dispatch is already in w."""


class Elastic:
    """One cell at a time, as the waterlevel falls; a growing prefix until the burst ends."""

    pauses: ClassVar[bool] = False

    def serves(self, state: State, cell: Cell) -> bool:
        return True

    def leavers(self, state: State) -> list[Cell]:
        cell = next_in_line(state)
        if cell is None or not may_leave(state.waterlevel, state.capacity, state.config.slots_per_cell):
            return []
        has_work = cell.cell == CORE or state.has_unclaimed_work or not state.config.leave_only_for_work
        return [cell] if has_work else []

    def num_kept(self, state: State) -> int:
        """The core alone if it finds data; with `two_way` the longest prefix that w, less the backlog, does not need back.

        A backlog never keeps the last server from rollout: what waits there is what the step may be waiting for.
        """
        prefix = state.cells.prefix
        if not prefix or prefix[0].cell != CORE or not state.has_data or state.num_steps_to_open <= 0:
            return 0
        if not state.config.two_way:
            return 1 if may_leave(state.waterlevel, state.capacity_total, state.config.slots_per_cell) else 0
        spare = (state.capacity_total - state.waterlevel + state.config.num_may_wait) // state.config.slots_per_cell
        num_servers = state.cells.num_alive + sum(state.standalone_alive)
        return max(0, min(spare, len(prefix), num_servers - 1 if state.waterlevel else num_servers))


class Colocate:
    """All cells together, when what never leaves can serve what is unfinished (without standalone engines: w = 0)."""

    pauses: ClassVar[bool] = False

    def serves(self, state: State, cell: Cell) -> bool:
        return True

    def leavers(self, state: State) -> list[Cell]:
        if next_in_line(state) is None:
            return []
        cells = state.cells.in_rollout()
        return cells if may_leave(state.waterlevel, state.capacity, state.slots(cells)) else []

    def num_kept(self, state: State) -> int:
        prefix = state.cells.prefix
        if not prefix or prefix[0].cell != CORE or not state.has_data or state.num_steps_to_open <= 0:
            return 0
        stays = state.waterlevel <= state.capacity_total - state.slots(prefix)
        return len(prefix) if stays else 0


class Async:
    """A fixed split: the first cells go to training when the run starts and never come back; the others never leave."""

    pauses: ClassVar[bool] = False

    def serves(self, state: State, cell: Cell) -> bool:
        return cell.cell >= state.config.training_cells

    def leavers(self, state: State) -> list[Cell]:
        if len(state.cells.prefix) >= state.config.training_cells:
            return []
        return [cell for cell in state.cells.all[: state.config.training_cells] if cell.state is CellState.ROLLOUT]

    def num_kept(self, state: State) -> int:
        return len(state.cells.prefix)


POLICIES: Final[dict[PolicyName, type[Policy]]] = {"elastic": Elastic, "colocate": Colocate, "async": Async}


def next_in_line(state: State) -> Cell | None:
    """The cell whose turn it is to leave, the core first. None while another is on its way, where no step of this burst can be joined any more,
    and as long as there is nothing to lead to: no data for the core, no core in training for a satellite.
    """
    if state.cells.num_in_transit or not is_join_window_open(state):
        return None
    cell = state.cells.next_to_leave()
    if cell is None:
        return None
    is_led = state.has_data if cell.cell == CORE else state.cells.core.state is CellState.TRAINING
    return cell if is_led else None


def is_join_window_open(state: State) -> bool:
    """Who arrives now can still join a step of this burst: it shuts at the optimizer of the last step, and while publishing."""
    if state.must_publish or state.training.state is StepState.PUBLISHING:
        return False
    if state.training.state in (StepState.REDUCING, StepState.OPTIMIZING):
        return state.num_steps_to_open > 0
    return state.steps_done < state.burst_end
