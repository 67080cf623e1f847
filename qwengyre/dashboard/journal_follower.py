"""Reading a journal on as it grows, a bounded time at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from qwengyre.journal import read
from qwengyre.journal.frames import HEADER

RECORDS_PER_LOOK: Final = 500
"""Records between two looks at the clock while a journal is read."""


def share_of(positions: Mapping[Path, int], journals: Iterable[Path]) -> float:
    """How much of all records in `journals` lies before `positions`. A journal that has none yet counts as read."""
    sizes = {journal: max(0, journal.stat().st_size - len(HEADER)) for journal in journals if journal.is_file()}
    num_read = sum(min(size, max(0, positions.get(journal, 0) - len(HEADER))) for journal, size in sizes.items())
    return num_read / sum(sizes.values()) if any(sizes.values()) else 1.0


class JournalFollower:
    """Hands every record to `_take`, once. Not safe to share between threads: whoever serves requests side by side holds a lock around it."""

    def __init__(self, journal: Path, kind: Any):
        """`kind` is the union of the journal's records."""
        self.position = 0
        """Where the next record begins; within `_take`, where this one began."""
        self._journal, self._kind = journal, kind

    def refresh(self, budget_s: float = 1.0) -> bool:
        """Read on for at most about `budget_s`; return whether the end of the journal was reached. Raises JournalError."""
        if not self._journal.is_file() or self._journal.stat().st_size <= max(self.position, len(HEADER)):
            return True
        until = time.monotonic() + budget_s
        for number, (position, record) in enumerate(read(self._journal, self._kind, start=self.position)):
            self._take(record)
            self.position = position
            if number % RECORDS_PER_LOOK == RECORDS_PER_LOOK - 1 and time.monotonic() > until:
                return False
        return True

    @property
    def share_read(self) -> float:
        """Of the journal's bytes."""
        return share_of({self._journal: self.position}, [self._journal])

    def _take(self, record: Any) -> None:
        raise NotImplementedError
