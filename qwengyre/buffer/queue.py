"""The queue of micro-steps of the open step: cells claim one at a time, what a lost cell had comes back."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from qwengyre.core.ids import MicroStepId


class QueuedMicroStep(msgspec.Struct, frozen=True, order=True, gc=False):
    """A micro-step with its place in the queue, which it keeps when it comes back."""

    place: int
    micro_step: MicroStepId


class MicroStepQueue:
    """First in, first out, except that what comes back has its old place. A claim is one call, hence atomic.

    >>> queue = MicroStepQueue()
    >>> queue.put(["a", "b"])
    >>> lost = queue.claim()
    >>> queue.put_back(lost)
    >>> queue.claim().micro_step, len(queue)
    ('a', 1)
    """

    def __init__(self) -> None:
        self._heap: list[QueuedMicroStep] = []
        self._next_place = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, micro_steps: Iterable[MicroStepId]) -> None:
        for micro_step in micro_steps:
            heapq.heappush(self._heap, QueuedMicroStep(self._next_place, micro_step))
            self._next_place += 1

    def claim(self) -> QueuedMicroStep:
        """Take the first micro-step. Raises IndexError if there is none."""
        return heapq.heappop(self._heap)

    def put_back(self, entry: QueuedMicroStep) -> None:
        heapq.heappush(self._heap, entry)

    def clear(self) -> None:
        self._heap.clear()

    def waiting(self) -> list[MicroStepId]:
        return [entry.micro_step for entry in sorted(self._heap)]
