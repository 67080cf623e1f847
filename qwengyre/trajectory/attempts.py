"""From the records of a gateway to the calls of each attempt: what a restart, an export and a simulation read a journal with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.records import Closed, GatewayRecord, Opened


class Attempts:
    """The attempts that records tell of, record by record. Only those that are open, and `wanted`, are held in memory."""

    def __init__(self, wanted: Callable[[Opened], bool] = lambda opened: True):
        self.open: dict[int, CallLog] = {}
        """By session."""
        self._wanted = wanted

    def apply(self, record: GatewayRecord) -> CallLog | None:
        """The attempt that the record is of; None for one that is not wanted. Raises RecordError for a contradiction."""
        if isinstance(record, Opened):
            if not self._wanted(record):
                return None
            log = self.open[record.session] = CallLog(record)
            return log
        if isinstance(record, Closed):
            closed = self.open.pop(record.session, None)
            if closed is not None:
                closed.is_closed = True
            return closed
        known = self.open.get(record.session)
        if known is not None:
            known.apply(record)
        return known


def recorded_attempts(
    records: Iterable[GatewayRecord], wanted: Callable[[Opened], bool] = lambda opened: True
) -> Iterator[CallLog]:
    """Every attempt, as soon as it is closed; those still open last. Raises RecordError."""
    attempts = Attempts(wanted)
    for record in records:
        attempt = attempts.apply(record)
        if attempt is not None and attempt.is_closed:
            yield attempt
    yield from attempts.open.values()
