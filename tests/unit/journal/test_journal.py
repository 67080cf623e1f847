from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import JournalCorrupt, JournalError, JournalInUse
from qwengyre.journal import Journal, is_in_use, read
from qwengyre.journal.frames import HEADER, PREFIX_BYTES


class Noted(msgspec.Struct, frozen=True, tag=True):
    text: str


class Counted(msgspec.Struct, frozen=True, tag=True):
    n: int


Records = Noted | Counted


def records_of(path: Path, start: int = 0) -> list:
    return [record for _, record in read(path, Records, start=start)]


def write(path: Path, *records: msgspec.Struct) -> list[int]:
    with Journal.open(path, Records) as journal:
        return [journal.append(record) for record in records]


def test_read_returns_what_was_appended_in_order_over_several_openings(tmp_path: Path):
    path = tmp_path / "journal" / "a.log"
    first = write(path, Noted("one"), Counted(2))
    second = write(path, Noted("three"))
    assert records_of(path) == [Noted("one"), Counted(2), Noted("three")]
    assert [position for position, _ in read(path, Records)] == first + second
    assert second[-1] == path.stat().st_size


def test_a_position_is_where_reading_goes_on_behind_its_record(tmp_path: Path):
    path = tmp_path / "a.log"
    positions = write(path, *(Counted(n) for n in range(5)))
    assert records_of(path, start=positions[2]) == [Counted(3), Counted(4)]
    assert records_of(path, start=positions[4]) == []


def test_a_reader_that_looks_whether_a_journal_is_in_use_does_not_keep_its_writer_out(tmp_path: Path):
    path = tmp_path / "a.log"
    write(path, Counted(1))
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    done_looking = threading.Timer(0.05, os.close, [looking])
    done_looking.start()
    write(path, Counted(2))
    done_looking.join()
    assert records_of(path) == [Counted(1), Counted(2)]


def test_a_second_reading_can_be_bounded_by_the_first(tmp_path: Path):
    path = tmp_path / "a.log"
    positions = write(path, *(Counted(n) for n in range(3)))
    write(path, Counted(3))
    assert [record for _, record in read(path, Records, until=positions[2])] == [Counted(0), Counted(1), Counted(2)]
    assert [record for _, record in read(path, Records, start=positions[0], until=positions[1])] == [Counted(1)]
    assert [record for _, record in read(path, Records, until=0)] == []


def test_what_looks_damaged_while_it_is_written_is_read_once_it_is_whole(tmp_path: Path):
    """A file system may show a live writer's bytes out of order: zeros first, what belongs there a moment later."""
    path = tmp_path / "a.log"
    positions = write(path, *(Counted(n) for n in range(4)))
    whole = path.read_bytes()
    torn = bytearray(whole)
    torn[positions[1] : positions[2]] = bytes(positions[2] - positions[1])
    path.write_bytes(torn)
    reading = read(path, Records)
    seen = [next(reading)[1], next(reading)[1]]
    path.write_bytes(whole)
    assert [*seen, *(record for _, record in reading)] == [Counted(n) for n in range(4)]


def test_append_is_visible_to_a_reader_before_any_sync(tmp_path: Path):
    path = tmp_path / "a.log"
    with Journal.open(path, Records) as journal:
        journal.append(Counted(1))
        assert records_of(path) == [Counted(1)]


def test_append_refuses_a_record_of_another_journal(tmp_path: Path):
    class Foreign(msgspec.Struct, tag=True):
        n: int

    with Journal.open(tmp_path / "a.log", Records) as journal, pytest.raises(TypeError, match="Foreign"):
        journal.append(Foreign(1))


def test_an_unfinished_last_write_is_cut_kept_aside_and_reported(tmp_path: Path):
    path = tmp_path / "a.log"
    positions = write(path, Noted("kept"), Noted("torn"))
    torn = path.read_bytes()[positions[0] : -3]
    os.truncate(path, positions[1] - 3)
    with Journal.open(path, Records) as journal:
        cut = journal.cut
        assert cut is not None and (cut.offset, cut.num_bytes) == (positions[0], len(torn))
        assert Path(cut.kept_as).read_bytes() == torn
        assert "kept as" in str(cut) and cut.kept_as.endswith(f".corrupt-{positions[0]}")
        journal.append(Noted("after"))
    assert records_of(path) == [Noted("kept"), Noted("after")]
    with Journal.open(path, Records) as journal:
        assert journal.cut is None


def test_a_reader_stops_before_a_tail_that_is_still_being_written(tmp_path: Path):
    path = tmp_path / "a.log"
    write(path, Noted("whole"), Noted("half"))
    os.truncate(path, path.stat().st_size - 1)
    assert records_of(path) == [Noted("whole")]


def test_damage_before_intact_records_is_refused_and_nothing_is_cut(tmp_path: Path):
    path = tmp_path / "a.log"
    positions = write(path, Noted("one"), Noted("two"), Noted("three"))
    data = bytearray(path.read_bytes())
    data[positions[0] + PREFIX_BYTES + 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalCorrupt, match=f"byte {positions[0]}.*from byte {positions[1]}") as raised:
        Journal.open(path, Records)
    assert raised.value.offset == positions[0]
    assert path.read_bytes() == data
    with pytest.raises(JournalCorrupt):
        records_of(path)


def test_a_frame_inside_a_payload_is_not_taken_for_a_record_behind_damage(tmp_path: Path):
    inner = tmp_path / "inner.log"
    write(inner, Counted(1), Counted(2))

    class Blob(msgspec.Struct, tag=True):
        data: bytes

    path = tmp_path / "outer.log"
    with Journal.open(path, Blob) as journal:
        journal.append(Blob(inner.read_bytes()))
    os.truncate(path, path.stat().st_size - 1)
    with Journal.open(path, Blob) as journal:
        assert journal.cut is not None and journal.cut.offset == len(HEADER)


def test_a_second_writer_is_refused(tmp_path: Path):
    path = tmp_path / "a.log"
    with Journal.open(path, Records), pytest.raises(JournalInUse, match="another process"):
        Journal.open(path, Records)


def test_other_files_are_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("these are not records at all")
    with pytest.raises(JournalError, match="not a journal"):
        Journal.open(path, Records)
    assert path.read_text() == "these are not records at all"
    with pytest.raises(JournalError, match="run folder"):
        records_of(tmp_path / "missing.log")


def test_a_folder_in_its_place_is_no_journal(tmp_path: Path):
    (tmp_path / "book.log").mkdir()
    with pytest.raises(JournalError, match="cannot be read"):
        list(read(tmp_path / "book.log", Noted))
    with pytest.raises(JournalError, match="cannot be written"):
        Journal.open(tmp_path / "book.log", Noted)


def test_a_header_that_was_not_whole_starts_an_empty_journal(tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_bytes(HEADER[:5])
    assert records_of(path) == []
    write(path, Counted(1))
    assert records_of(path) == [Counted(1)]


def test_a_record_of_an_unknown_type_is_named(tmp_path: Path):
    path = tmp_path / "a.log"
    write(path, Counted(1))
    with pytest.raises(JournalError, match="byte 16 was written by another version"):
        list(read(path, Noted))


FILL = """
import resource, sys
from tests_types import Noted
from qwengyre.core.errors import JournalFull
from qwengyre.journal import Journal

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
journal = Journal.open(sys.argv[1], Noted)
num_written = 0
try:
    while True:
        journal.append(Noted("x" * 100))
        num_written += 1
except JournalFull as error:
    print(num_written)
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
journal.append(Noted("small"))
"""


def test_a_full_disk_leaves_no_half_record_and_says_what_to_do(tmp_path: Path):
    (tmp_path / "tests_types.py").write_text(
        "import msgspec\nclass Noted(msgspec.Struct, frozen=True, tag=True):\n    text: str\n"
    )
    path = tmp_path / "a.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    num_written, message = done.stdout.splitlines()
    assert "free some space" in message and "--resume" in message
    assert records_of(path) == [Noted("x" * 100)] * int(num_written) + [Noted("small")]


class CountingJournal(Journal):
    """Counts the waits for the disk."""

    num_syncs = 0

    def _fdatasync(self) -> None:
        self.num_syncs += 1
        super()._fdatasync()


async def test_waiters_share_one_wait_for_the_disk(tmp_path: Path):
    journal = CountingJournal.open(tmp_path / "a.log", Records, policy="disk")

    async def one(n: int) -> None:
        position = journal.append(Counted(n))
        assert journal.durable_position < position
        await journal.wait_durable(position)
        assert journal.durable_position >= position

    async def many() -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(100):
                group.create_task(one(n))

    await many()
    assert 1 <= journal.num_syncs <= 3
    journal.close()
    assert len(records_of(journal.path)) == 100


async def test_the_os_policy_never_waits_for_the_disk(tmp_path: Path):
    journal = CountingJournal.open(tmp_path / "a.log", Records)
    position = journal.append(Counted(1))
    assert journal.durable_position == position
    await journal.wait_durable()
    assert journal.num_syncs == 0


async def test_a_failed_sync_reaches_every_waiter_and_stops_the_journal(tmp_path: Path):
    journal = Journal.open(tmp_path / "a.log", Records, policy="disk")
    position = journal.append(Counted(1))
    os.close(journal._fd)

    async def both() -> list:
        return await asyncio.gather(journal.wait_durable(position), journal.wait_durable(position), return_exceptions=True)

    assert [type(result) for result in await both()] == [JournalError, JournalError]
    with pytest.raises(JournalError, match="disk failed"):
        journal.append(Counted(2))


def test_a_closed_journal_refuses_records(tmp_path: Path):
    journal = Journal.open(tmp_path / "a.log", Records)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(Counted(1))


def test_a_journal_is_in_use_while_its_writer_has_it_open(tmp_path):
    path = tmp_path / "a.log"
    with Journal.open(path, Noted):
        assert is_in_use(path)
    assert not is_in_use(path)
