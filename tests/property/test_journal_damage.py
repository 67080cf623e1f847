"""Whatever happens to the end of a journal, opening it gives back every record before the damage, and only those."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.journal import Journal, read
from qwengyre.journal.frames import HEADER, MARK


class Blob(msgspec.Struct, frozen=True, tag=True):
    data: bytes


blobs = st.binary(max_size=60) | st.just(MARK) | st.just(MARK + b"\x01\x00\x00\x00")
journals = st.lists(blobs, min_size=1, max_size=8)


def write(folder: str, payloads: list[bytes]) -> tuple[Path, list[int]]:
    path = Path(folder) / "a.log"
    with Journal.open(path, Blob) as journal:
        return path, [journal.append(Blob(data)) for data in payloads]


def reopened(path: Path) -> tuple[list[bytes], Journal]:
    with Journal.open(path, Blob) as journal:
        journal.append(Blob(b"new"))
    return [record.data for _, record in read(path, Blob)], journal


@given(journals, st.data())
def test_any_truncation_keeps_exactly_the_whole_records(payloads: list[bytes], data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        path, positions = write(folder, payloads)
        size = data.draw(st.integers(len(HEADER), positions[-1]))
        os.truncate(path, size)
        num_whole = sum(position <= size for position in positions)
        kept, journal = reopened(path)
        assert kept == [*payloads[:num_whole], b"new"]
        end = positions[num_whole - 1] if num_whole else len(HEADER)
        assert (journal.cut.num_bytes if journal.cut else 0) == size - end


@given(journals, st.data())
def test_any_damage_within_the_last_record_loses_only_that_record(payloads: list[bytes], data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        path, positions = write(folder, payloads)
        start = positions[-2] if len(positions) > 1 else len(HEADER)
        at = data.draw(st.integers(start, positions[-1] - 1))
        content = bytearray(path.read_bytes())
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        kept, journal = reopened(path)
        assert kept == [*payloads[:-1], b"new"]
        assert journal.cut is not None
        assert Path(journal.cut.kept_as).read_bytes() == bytes(content[start:])


@given(journals, st.binary(min_size=1, max_size=80))
def test_rubbish_behind_the_last_record_is_cut(payloads: list[bytes], rubbish: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path, positions = write(folder, payloads)
        with open(path, "ab") as file:
            file.write(rubbish)
        kept, journal = reopened(path)
        assert kept == [*payloads, b"new"]
        assert journal.cut is not None and journal.cut.offset == positions[-1]
