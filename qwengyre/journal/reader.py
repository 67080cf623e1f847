"""Read a journal, whole or from a position on, also while another process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec

from qwengyre.core.errors import JournalCorrupt, JournalError
from qwengyre.journal.frames import HEADER, PREFIX_BYTES, is_intact, next_intact, payload_length


class Cut(msgspec.Struct, frozen=True):
    """A damaged tail that was cut off when a journal was opened for writing: at most the last, unfinished write."""

    path: str
    offset: int
    """The journal now ends here."""
    num_bytes: int
    """How much was cut."""
    kept_as: str
    """File with the bytes that were cut."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: cut {self.num_bytes} damaged bytes at byte {self.offset} ({self.reason}); kept as {self.kept_as}"


def record_types(types: object) -> tuple[type, ...]:
    """The Structs of a union such as `CallRecord`, or of a tuple of Structs, or one Struct."""
    if isinstance(types, tuple):
        return types
    return get_args(types) or (types,)


def record_decoder(types: object) -> msgspec.msgpack.Decoder[Any]:
    union: Any = None
    for record_type in record_types(types):
        union = record_type if union is None else union | record_type
    return msgspec.msgpack.Decoder(union)


def read(path: str | Path, types: object, *, start: int = 0, until: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (position, record) for every record after `start`, in the order of writing.

    A position is the number of bytes up to and including the record: pass it as `start` to go on after that record, and as
    `until` to see nothing that was written later. Whoever reads a journal twice bounds the second reading by the first:
    the run may be writing to it.

    `types` is a union (or tuple) of tagged Structs. Reading ends before a tail that is not whole: a writer may be
    working on it. Raises JournalCorrupt when intact records follow a damaged one, JournalError when the file is not a
    journal, is missing, or holds a record that is not among `types`.
    """
    decode = record_decoder(types).decode
    for position, payload in payloads(path, start=start, until=until):
        try:
            record = decode(payload)
        except msgspec.MsgspecError as error:
            offset = position - len(payload) - PREFIX_BYTES
            raise JournalError(
                f"{path}: the record at byte {offset} was written by another version of QwenGyre ({error})"
            ) from error
        yield position, record


def payloads(path: str | Path, *, start: int = 0, until: int | None = None) -> Iterator[tuple[int, bytes]]:
    """As `read`, without decoding."""
    offset, damaged_at = max(start, len(HEADER)), -1
    while True:
        with _open(path) as file:
            if not _has_header(file, path):
                return
            for position, payload in _intact_frames(file, offset):
                if until is not None and position > until:
                    return
                yield position, payload
                offset = position
            file.seek(offset)
            following = next_intact(file.read(), offset)
        if following is None or following == offset:
            return
        if offset == damaged_at:
            raise _damaged(path, offset, following)
        # A live writer may have finished or replaced the record while it was looked at: only what is damaged twice is damaged.
        damaged_at = offset


def _intact_frames(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """(position, payload) of the frames from `offset` on, up to the first one that is not whole."""
    file.seek(offset)
    while True:
        prefix = file.read(PREFIX_BYTES)
        length = payload_length(prefix)
        if length is None:
            return
        payload = file.read(length)
        if not is_intact(prefix, payload, offset):
            return
        offset += PREFIX_BYTES + length
        yield offset, payload


def end_of_records(path: str | Path) -> int:
    """The position of the last record (the header's end when there is none). Raises as `read`."""
    end = len(HEADER)
    for end, _ in payloads(path):  # noqa: B007
        pass
    return end


def _open(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=1 << 20)
    except FileNotFoundError as error:
        raise JournalError(f"{path}: there is no journal here. Is this a run folder?") from error
    except OSError as error:
        raise JournalError(f"{path}: this journal cannot be read ({error.strerror})") from error


def _has_header(file: BinaryIO, path: str | Path) -> bool:
    """False for a file whose writer was stopped before the header was whole."""
    found = file.read(len(HEADER))
    if found == HEADER:
        return True
    if HEADER.startswith(found):
        return False
    raise JournalError(f"{path}: not a journal of this version of QwenGyre (it starts with {found[:16]!r})")


def _damaged(path: str | Path, offset: int, following: int) -> JournalCorrupt:
    return JournalCorrupt(
        str(path),
        offset=offset,
        reason=f"the record there is damaged but intact ones follow from byte {following} on, so this is not a cut-off write. "
        "Restore the file from a copy; to go on without what follows, truncate it to that length yourself",
    )
