"""Who reads a snapshot from whom, so that no holder sends it more than `fanout` times, however many cells read it.

    the owner ──> reader 1 ──> readers 3, 4        what a reader has read it holds in memory of its own and serves on
              └─> reader 2 ──> readers 5, 6

A place is given to a reader when somebody who has the snapshot has sent it less often than `fanout` allows; until then the reader waits.
One whose source breaks is given another; the source that broke gets no more readers. When all who may send have sent enough, and nobody
who will is under way (some that had it have died), the one that has sent least sends once more, the owner only if nobody else has it: a
bound is never worth a reader.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from qwengyre.transfer.api import Exposure, Pieces, Transport
from qwengyre.transfer.layout import placeholders


class Source(NamedTuple):
    """Where a reader reads."""

    exposure: Exposure
    serves_on: bool
    """It shall hold what it reads for others: see `hold`."""


class ReaderTree:
    """The readers of one snapshot. `fanout` 0: all read from the owner."""

    def __init__(self, exposure: Exposure, owner: int, *, fanout: int, num_readers: int) -> None:
        self.exposure, self.owner, self._fanout = exposure, owner, fanout
        self._held: dict[int, Exposure] = {owner: exposure}
        """By who holds it, in the order in which they had it."""
        self.sent: dict[int, int] = {owner: 0}
        """How often each has sent it, or is about to."""
        self._reading: dict[int, tuple[int, bool]] = {}
        """Reader -> from whom, and whether it will serve it on."""
        self._to_come = max(0, -(-(num_readers - fanout) // fanout)) if fanout else 0
        """So many of the readers are still wanted to serve it on: enough for all, if each sends `fanout` times."""

    def take(self, reader: int) -> Source | None:
        """Where `reader` reads; None: it waits until somebody else has read. Told again it begins anew."""
        if reader == self.owner:
            return Source(self.exposure, False)
        self.lost(reader)
        if not self._fanout:
            return self._give(reader, self.owner)
        for holder in self._held:
            if self.sent[holder] < self._fanout:
                return self._give(reader, holder)
        if any(serves_on for _, serves_on in self._reading.values()):
            return None
        return self._give(reader, min(self._held, key=lambda holder: (holder == self.owner, self.sent[holder])))

    def holds(self, reader: int, exposure: Exposure) -> None:
        """It has read, and serves it on as `exposure`."""
        if self._reading.pop(reader, None) is not None:
            self._held[reader], self.sent[reader] = exposure, 0

    def has_read(self, reader: int) -> None:
        """It has read, for itself alone, or from what it holds."""
        self._reading.pop(reader, None)

    def broke(self, reader: int) -> None:
        """Its source did not give it the snapshot: nobody else is sent there, unless it is the owner."""
        source = self._forget(reader)
        if source is not None and source != self.owner:
            self.lost(source)

    def lost(self, reader: int) -> None:
        """It reads no more, and holds nothing."""
        self._forget(reader)
        if reader != self.owner and self._held.pop(reader, None) is not None:
            del self.sent[reader]
            self._to_come += 1

    def _forget(self, reader: int) -> int | None:
        """A read under way counts for nothing; return from whom it was."""
        if (reading := self._reading.pop(reader, None)) is None:
            return None
        source, serves_on = reading
        if source in self._held:
            self.sent[source] -= 1
        self._to_come += serves_on
        return source

    def _give(self, reader: int, holder: int) -> Source:
        serves_on = self._to_come > 0
        self._to_come -= serves_on
        self.sent[holder] += 1
        self._reading[reader] = holder, serves_on
        return Source(self._held[holder], serves_on)


def hold(transport: Transport, snapshot: Exposure) -> Exposure:
    """Read a snapshot, of all ranks, into memory of this process that others can read, under the same version and incarnation.

    Raises StaleRead, TransferError: then nothing is held.
    """
    held: list[Exposure] = []
    try:
        for part in (snapshot, *snapshot.others):
            like: dict[str, Pieces] = dict(placeholders(part))
            held.append(transport.reserve(like, version=part.version, incarnation=part.incarnation))
            into: dict[str, Pieces] = dict(transport.buffers(held[-1]))
            transport.read(part, into)
            held[-1] = transport.republish(held[-1], version=part.version)
    except BaseException:
        for part in held:
            transport.release(part)
        raise
    return msgspec.structs.replace(held[0], others=tuple(held[1:]))


def let_go(transport: Transport, held: Exposure) -> None:
    """Release what `hold` took."""
    for part in (held, *held.others):
        transport.release(part)
