"""Append to a journal, with group commit.

`append` is one write(2): from then on the record survives the death of this process. Under the "disk" policy
`wait_durable` also waits for fdatasync; waiters that come while one is running share the next.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from qwengyre.core.errors import JournalError, JournalFull, JournalInUse
from qwengyre.journal.frames import HEADER, MAX_PAYLOAD_BYTES, frame
from qwengyre.journal.reader import Cut, end_of_records, record_types

SyncPolicy = Literal["os", "disk"]
"""What `wait_durable` waits for. "os": the record survives any kill of our processes. "disk": and a power cut."""

LOCK_TRIES: Final = 25
LOCK_AGAIN_S: Final = 0.02
"""Half a second in all: many times what a reader holds the lock, and not long to wait for a refusal."""

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Journal:
    """The one writer of a journal file. Made by `Journal.open`; used from one thread.

    A position is the number of bytes up to and including a record: `position` after `append` names that record, and
    `read(path, types, start=position)` continues after it.

    >>> import tempfile
    >>> class Paid(msgspec.Struct, tag=True):
    ...     amount: int
    >>> path = Path(tempfile.mkdtemp()) / "book.log"
    >>> with Journal.open(path, Paid) as journal:
    ...     position = journal.append(Paid(amount=3))
    >>> from qwengyre.journal import read
    >>> [record for _, record in read(path, Paid)]
    [Paid(amount=3)]
    """

    def __init__(self, path: Path, fd: int, types: tuple[type, ...], end: int, policy: SyncPolicy, cut: Cut | None):
        self.path, self.policy = path, policy
        self.cut = cut
        """The damaged tail that opening cut off, None if there was none: tell the user."""
        self._fd, self._types, self._end = fd, frozenset(types), end
        self._durable = end
        self._encode = msgspec.msgpack.Encoder().encode
        self._syncing: asyncio.Future[None] | None = None
        self._broken: str | None = None

    @classmethod
    def open(cls, path: str | Path, types: object, *, policy: SyncPolicy = "os") -> Self:
        """Open for appending, making the file and its folder if needed; check every record that is there.

        `types` is a union or tuple of tagged Structs. A damaged tail is moved aside into `PATH.corrupt-OFFSET`, cut,
        and described by `cut`. Raises JournalInUse when another process has it open, JournalCorrupt when intact
        records follow a damaged one, JournalFull and JournalError.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise JournalError(f"{path}: this journal cannot be written ({error.strerror})") from error
        try:
            _lock(fd, path)
            _ensure_header(fd, path)
            end = end_of_records(path)
            cut = _cut_tail(fd, path, end)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, record_types(types), end, policy, cut)

    @property
    def position(self) -> int:
        """The position of the last record."""
        return self._end

    @property
    def durable_position(self) -> int:
        """Everything up to here satisfies the sync policy."""
        return self._end if self.policy == "os" else self._durable

    def append(self, record: msgspec.Struct) -> int:
        """Write one record and return its position.

        Raises JournalFull when there is no room: the record is not in the journal, all earlier ones are.
        """
        if self._broken is not None:
            raise JournalError(self._broken)
        if type(record) not in self._types:
            raise TypeError(f"{type(record).__name__} is not a record of {self.path.name}")
        payload = self._encode(record)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise JournalError(f"{self.path}: a {type(record).__name__} of {len(payload)} bytes is too large to record")
        data = frame(payload, self._end)
        _write(self._fd, self.path, data, self._end)
        self._end += len(data)
        return self._end

    def sync(self) -> int:
        """Wait for the disk, whatever the policy, and return the position that is now safe."""
        target = self._end
        self._fdatasync()
        self._durable = max(self._durable, target)
        return target

    async def wait_durable(self, position: int | None = None) -> None:
        """Return once everything up to `position` (default: the last record) satisfies the sync policy."""
        target = self._end if position is None else position
        while self.durable_position < target:
            await asyncio.shield(self._syncing or self._start_sync())

    def close(self) -> None:
        """Sync under the "disk" policy, then close. Closing twice is harmless."""
        if self._fd < 0:
            return
        try:
            if self.policy == "disk" and self._broken is None:
                self.sync()
        finally:
            os.close(self._fd)
            self._fd = -1
            self._broken = f"{self.path}: this journal is closed"

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_sync(self) -> asyncio.Future[None]:
        target = self._end
        future = asyncio.get_running_loop().run_in_executor(None, self._fdatasync)

        def finished(done: asyncio.Future[None]) -> None:
            self._syncing = None
            if not done.cancelled() and done.exception() is None:
                self._durable = max(self._durable, target)

        future.add_done_callback(finished)
        self._syncing = future
        return future

    def _fdatasync(self) -> None:
        if self._broken is not None:
            raise JournalError(self._broken)
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # After a failed sync the kernel may have dropped dirty pages: nothing after it can be promised any more.
            self._broken = (
                f"{self.path}: the disk failed to store the journal ({error.strerror}). Check the disk, then resume the run"
            )
            raise JournalError(self._broken) from error


def is_in_use(path: Path) -> bool:
    """Whether another process has this journal open for writing."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock(fd: int, path: Path) -> None:
    """Raises JournalInUse. A reader that asks `is_in_use` holds the lock for a moment, a writer for good: that tells them apart."""
    for tries_left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if not tries_left:
                raise JournalInUse(str(path)) from error
            time.sleep(LOCK_AGAIN_S)


def _ensure_header(fd: int, path: Path) -> None:
    found = os.pread(fd, len(HEADER), 0)
    if found == HEADER or not HEADER.startswith(found):
        return  # a foreign file: the reader refuses it
    _write(fd, path, HEADER, 0)
    os.fsync(fd)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _cut_tail(fd: int, path: Path, end: int) -> Cut | None:
    size = os.fstat(fd).st_size
    if size <= end:
        return None
    aside = path.with_name(f"{path.name}.corrupt-{end}")
    with open(path, "rb") as damaged, open(aside, "wb") as kept:
        damaged.seek(end)
        shutil.copyfileobj(damaged, kept)
        kept.flush()
        os.fsync(kept.fileno())
    os.ftruncate(fd, end)
    os.fsync(fd)
    return Cut(path=str(path), offset=end, num_bytes=size - end, kept_as=str(aside), reason="the last write was not whole")


def _write(fd: int, path: Path, data: bytes, offset: int) -> None:
    """All of `data` at `offset`, or nothing: a part that was written is taken back."""
    try:
        written = os.pwrite(fd, data, offset)
        while written < len(data):
            written += os.pwrite(fd, data[written:], offset + written)
    except OSError as error:
        os.ftruncate(fd, offset)
        if error.errno in _FULL:
            raise JournalFull(str(path), num_bytes=len(data), reason=str(error.strerror)) from error
        raise JournalError(f"{path}: cannot write ({error.strerror}). Check the disk, then resume the run") from error
