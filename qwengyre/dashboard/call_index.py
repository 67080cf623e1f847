"""Where the calls of each execution lie in the journals of gateways, so that one is read without the others. Read on as the journal grows.

The journal is cut into blocks of whole records; of each attempt only the numbers of the blocks are held that have records of it. An
attempt of a hundred records among a hundred others is thus read from some megabytes, however long the journal is.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.ids import ExecutionId
from qwengyre.dashboard.journal_follower import JournalFollower, share_of
from qwengyre.journal import read
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.records import Closed, GatewayRecord, Opened
from qwengyre.trajectory.tree import TrajectoryTree

BLOCK_BYTES: Final = 1 << 18
"""A block is read and looked through in a few milliseconds."""


class _Attempt(msgspec.Struct):
    execution: ExecutionId
    attempt: int
    blocks: array[int]
    """Numbers of the blocks with records of it, rising."""
    is_closed: bool = False


class RecordedAttempt(msgspec.Struct, frozen=True):
    """One attempt of one execution as far as it was recorded."""

    opened: Opened
    tree: TrajectoryTree
    is_closed: bool


class RunCalls:
    """What the journals of a run's gateways say so far; `refresh` reads what came since. `journals()` are those that are there."""

    def __init__(self, journals: Callable[[], Sequence[Path]]):
        self._journals = journals
        self._parts: dict[Path, CallIndex] = {}

    def refresh(self, budget_s: float = 1.0) -> bool:
        """Read on for at most about `budget_s`; return whether the ends of all journals were reached. Raises JournalError."""
        until = time.monotonic() + budget_s
        for journal in self._journals():
            self._parts.setdefault(journal, CallIndex(journal))
        return all([part.refresh(max(0.0, until - time.monotonic())) for part in self._parts.values()])

    @property
    def share_read(self) -> float:
        """Of the journals' bytes."""
        return share_of({journal: part.position for journal, part in self._parts.items()}, self._journals())

    def attempts(self, execution: ExecutionId) -> list[int]:
        """Numbers of the attempts that were recorded so far, rising."""
        return sorted(attempt for part in self._parts.values() for attempt in part.attempts(execution))

    def find(self, execution: ExecutionId, attempt: int) -> RecordedAttempt | None:
        """Read one attempt; None for one that was not recorded. Raises JournalError, and RecordError for records that do not join."""
        found = (part.find(execution, attempt) for part in self._parts.values())
        return next((one for one in found if one is not None), None)


class CallIndex(JournalFollower):
    """What one gateway's journal says so far."""

    def __init__(self, journal: Path):
        super().__init__(journal, GatewayRecord)
        self._attempts: dict[int, _Attempt] = {}
        self._sessions: dict[ExecutionId, list[int]] = {}
        self._starts = array("Q")
        """Position before the first record of each block."""

    def attempts(self, execution: ExecutionId) -> list[int]:
        """Numbers of the attempts that were recorded so far, rising."""
        return sorted(self._attempts[session].attempt for session in self._sessions.get(execution, ()))

    def find(self, execution: ExecutionId, attempt: int) -> RecordedAttempt | None:
        """Read one attempt; None for one that was not recorded. Raises JournalError, and RecordError for records that do not join."""
        sessions = (number for number in self._sessions.get(execution, ()) if self._attempts[number].attempt == attempt)
        session = max(sessions, default=None)
        if session is None:
            return None
        log = next(recorded_attempts(self._records_of(session)), None)
        return RecordedAttempt(log.opened, TrajectoryTree(log), log.is_closed) if log is not None else None

    def _records_of(self, session: int) -> Iterator[GatewayRecord]:
        for block in self._attempts[session].blocks:
            stop = self._starts[block + 1] if block + 1 < len(self._starts) else self.position
            for _, record in read(self._journal, GatewayRecord, start=self._starts[block], until=stop):
                if record.session == session:
                    yield record

    def _take(self, record: GatewayRecord) -> None:
        if not self._starts or self.position - self._starts[-1] >= BLOCK_BYTES:
            self._starts.append(self.position)
        if isinstance(record, Opened):
            self._attempts[record.session] = _Attempt(record.execution, record.attempt, array("I"))
            self._sessions.setdefault(record.execution, []).append(record.session)
        attempt = self._attempts.get(record.session)
        if attempt is None:
            return
        block = len(self._starts) - 1
        if not attempt.blocks or attempt.blocks[-1] != block:
            attempt.blocks.append(block)
        if isinstance(record, Closed):
            attempt.is_closed = True
