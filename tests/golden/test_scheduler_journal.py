"""Recorded journals must replay to byte-equal commands: a change of any decision shows here."""

from __future__ import annotations

import gzip

import msgspec
import pytest

from qwengyre.scheduler.config import SchedulerConfig
from tests.golden.record_scheduler import FILE, NUM_RUNS, Line
from tests.property.random_driver import replay

LINES = [msgspec.json.decode(line, type=Line) for line in gzip.decompress(FILE.read_bytes()).splitlines()]


def test_all_runs_are_there():
    assert len(LINES) == NUM_RUNS
    assert {line.config["policy"] for line in LINES} == {"elastic", "colocate", "async"}


@pytest.mark.parametrize("index", range(NUM_RUNS))
def test_journal_replays_to_byte_equal_commands(index: int):
    line = LINES[index]
    config = msgspec.convert(line.config, SchedulerConfig)
    commands = replay(config, [bytes.fromhex(event) for event in line.events])
    assert [encoded.hex() for encoded in commands] == line.commands
