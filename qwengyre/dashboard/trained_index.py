"""Which micro-steps trained on an execution: the journal of what was trained, read on as it grows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from qwengyre.core.ids import ExecutionId
from qwengyre.core.records import MicroStep, TrainingExecution
from qwengyre.journal import read
from qwengyre.journal.frames import HEADER
from qwengyre.journal.reader import payloads


class _ExecutionHead(msgspec.Struct):
    execution: ExecutionId


class _MicroStepHead(msgspec.Struct, tag="MicroStep"):
    """What of a micro-step is looked at to find an execution: its arrays are skipped, not copied."""

    step: int
    executions: tuple[_ExecutionHead, ...]


_HEAD = msgspec.msgpack.Decoder(_MicroStepHead)


class TrainedPart(msgspec.Struct, frozen=True):
    """An execution as one step trained it."""

    step: int
    """Counted from 1."""
    execution: TrainingExecution


class TrainedIndex:
    """Not safe to share between threads: whoever serves requests side by side holds a lock around it."""

    def __init__(self, journal: Path):
        self._journal = journal
        self._position = 0
        self._places: dict[ExecutionId, list[tuple[int, int, int]]] = {}
        """(step, position before, position after) of each record with it."""

    def refresh(self) -> None:
        """Raises JournalError."""
        if not self._journal.is_file() or self._journal.stat().st_size <= max(self._position, len(HEADER)):
            return
        for position, payload in payloads(self._journal, start=self._position):
            head = _HEAD.decode(payload)
            for one in head.executions:
                self._places.setdefault(one.execution, []).append((head.step, self._position, position))
            self._position = position

    def find(self, execution: ExecutionId) -> list[TrainedPart]:
        """What the last step that trained on it took of it: several parts when it was cut. None if no step did."""
        places = self._places.get(execution, [])
        last = max((step for step, _, _ in places), default=0)
        parts: dict[str, TrainedPart] = {}
        for step, before, after in places:
            if step != last:
                continue
            for _, record in read(self._journal, MicroStep, start=before, until=after):
                found = next(one for one in record.executions if one.execution == execution)
                parts[record.micro_step] = TrainedPart(step + 1, found)
        return list(parts.values())
