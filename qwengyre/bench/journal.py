"""How fast a journal takes records: alone, and with group commit under more and more waiters."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from qwengyre.bench.output import say
from qwengyre.core.ids import ServerId
from qwengyre.journal import Journal, read
from qwengyre.trajectory.records import CallRecord, TokensSampled

RECORD = TokensSampled(
    session=99, call=17, token_ids=b"\1\0\0\0" * 8, logprobs=b"\0\0\0\xbf" * 8, version=3, server=ServerId("cell-1")
)


def journal(
    records: Annotated[int, typer.Option(min=1, help="How many to append without waiting.")] = 200_000,
    rounds: Annotated[int, typer.Option(min=1, help="How many each waiter appends and waits for.")] = 50,
    folder: Annotated[Path, typer.Option(help="Where: the disk of this folder is measured.")] = Path("."),
) -> None:
    """Appends and reads per second, and durable records per second by number of concurrent waiters."""
    with tempfile.TemporaryDirectory(prefix=".bench-journal-", dir=folder) as scratch:
        appended, replayed = append_and_read(Path(scratch) / "plain.log", records)
        say(f"append {appended:>12,.0f} records/s    read {replayed:,.0f} records/s    ({records:,} records of 8 tokens)")
        for num_waiters in (1, 16, 256):
            rate, syncs = asyncio.run(group_commit(Path(scratch) / f"{num_waiters}.log", num_waiters, rounds))
            say(f"durable {rate:>11,.0f} records/s    {syncs:,.0f} syncs/s    with {num_waiters} waiters")


def append_and_read(path: Path, num_records: int) -> tuple[float, float]:
    """Records per second of appending and of replaying."""
    with Journal.open(path, CallRecord) as log:
        began = time.perf_counter()
        for _ in range(num_records):
            log.append(RECORD)
        appended_s = time.perf_counter() - began
    began = time.perf_counter()
    num_read = sum(1 for _ in read(path, CallRecord))
    return num_records / appended_s, num_read / (time.perf_counter() - began)


class CountingJournal(Journal):
    """Counts the waits for the disk."""

    num_syncs = 0

    def _fdatasync(self) -> None:
        self.num_syncs += 1
        super()._fdatasync()


async def group_commit(path: Path, num_waiters: int, num_rounds: int) -> tuple[float, float]:
    """Durable records per second and syncs per second, with `num_waiters` tasks that each append and wait in turn."""
    log = CountingJournal.open(path, CallRecord, policy="disk")

    async def one() -> None:
        for _ in range(num_rounds):
            await log.wait_durable(log.append(RECORD))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_waiters):
            tasks.create_task(one())
    elapsed = time.perf_counter() - began
    log.close()
    return num_waiters * num_rounds / elapsed, log.num_syncs / elapsed
