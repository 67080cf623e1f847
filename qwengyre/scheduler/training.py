"""The open step: its phase, its members, who computes what, and what comes back when a member is lost.

A micro-step counts only when the core has committed the step, so everything that a member computed in the open step is
remembered and queued again when the member is lost.
"""

from __future__ import annotations

import heapq
from enum import Enum
from typing import Final

from qwengyre.buffer.groups import Group
from qwengyre.buffer.queue import MicroStepQueue, QueuedMicroStep
from qwengyre.core.ids import CORE, CellId
from qwengyre.core.state_machine import advance
from qwengyre.scheduler.commands import CloseStep, Command, OpenStep, Publish
from qwengyre.scheduler.events import CellLost, Event, Published, StepDone, StepOpened, StepReduced


class StepState(Enum):
    NONE = "none"
    OPENING = "opening"
    OPEN = "open"
    REDUCING = "reducing"
    OPTIMIZING = "optimizing"
    PUBLISHING = "publishing"


class CoreLost:
    """The step's own name for the loss of the core, which ends it in any phase."""


STEP: Final[dict[tuple[StepState, type], StepState]] = {
    (StepState.NONE, OpenStep): StepState.OPENING,
    (StepState.OPENING, StepOpened): StepState.OPEN,
    (StepState.OPEN, CloseStep): StepState.REDUCING,
    (StepState.REDUCING, CellLost): StepState.OPEN,
    (StepState.REDUCING, StepReduced): StepState.OPTIMIZING,
    (StepState.OPTIMIZING, StepDone): StepState.NONE,
    (StepState.NONE, Publish): StepState.PUBLISHING,
    (StepState.PUBLISHING, Published): StepState.NONE,
    (StepState.NONE, CoreLost): StepState.NONE,
    (StepState.OPENING, CoreLost): StepState.NONE,
    (StepState.OPEN, CoreLost): StepState.NONE,
    (StepState.REDUCING, CoreLost): StepState.NONE,
    (StepState.OPTIMIZING, CoreLost): StepState.NONE,
    (StepState.PUBLISHING, CoreLost): StepState.NONE,
}


class Training:
    """The step that is open, or none."""

    def __init__(self) -> None:
        self.state = StepState.NONE
        self.ticket = 0
        """The answer that the phase waits for."""
        self.queue = MicroStepQueue()
        self.taken: list[Group] = []
        self.members: dict[CellId, int] = {}
        """Cells that hold the step's snapshot, with the order in which they claim."""
        self.joining: dict[CellId, tuple[int, int]] = {}
        """Cells that pull the snapshot: ticket, rank."""
        self.waiting: dict[CellId, int] = {}
        """Cells in training that are not yet members, with their rank."""
        self.claims: dict[CellId, tuple[int, QueuedMicroStep]] = {}
        self.done: dict[CellId, list[QueuedMicroStep]] = {}
        self._idle: list[tuple[int, CellId]] = []

    def advance(self, event: Event | Command | CoreLost) -> None:
        self.state = advance(STEP, "the step", self.state, event)

    @property
    def num_executions(self) -> int:
        """E of the open step, final once all its groups are taken."""
        return sum(group.num_valid for group in self.taken)

    def take(self, group: Group) -> None:
        self.taken.append(group)
        self.queue.put(group.micro_steps)

    def join(self, cell: CellId, rank: int) -> None:
        """Make a cell a member: it may claim."""
        self.joining.pop(cell, None)
        self.waiting.pop(cell, None)
        self.members[cell] = rank
        self.done[cell] = []
        heapq.heappush(self._idle, (rank, cell))

    def next_idle(self) -> CellId | None:
        """The first member without a claim, or None."""
        while self._idle:
            rank, cell = self._idle[0]
            if self.members.get(cell) == rank and cell not in self.claims:
                return cell
            heapq.heappop(self._idle)
        return None

    def claim(self, cell: CellId, ticket: int) -> QueuedMicroStep:
        entry = self.queue.claim()
        self.claims[cell] = ticket, entry
        heapq.heappop(self._idle)
        return entry

    def finish(self, cell: CellId) -> None:
        """Count a cell's claim as computed."""
        self.done[cell].append(self.claims.pop(cell)[1])
        heapq.heappush(self._idle, (self.members[cell], cell))

    def lose(self, cell: CellId) -> None:
        """Forget a cell; its claim and all that it computed in this step go back to their places in the queue."""
        self.waiting.pop(cell, None)
        self.joining.pop(cell, None)
        if self.members.pop(cell, None) is None:
            return
        if claim := self.claims.pop(cell, None):
            self.queue.put_back(claim[1])
        for entry in self.done.pop(cell):
            self.queue.put_back(entry)

    def clear(self) -> list[Group]:
        """End the step, whatever its phase; return its groups. Satellites in it wait for the next step."""
        taken, self.taken = self.taken, []
        self.waiting.update(self.members)
        self.waiting.update((cell, rank) for cell, (_, rank) in self.joining.items())
        self.waiting.pop(CORE, None)
        for table in (self.members, self.joining, self.claims, self.done):
            table.clear()
        self.queue.clear()
        self._idle.clear()
        return taken
