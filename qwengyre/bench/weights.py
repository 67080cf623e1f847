"""Snapshots: how fast satellites read one, what it costs the core, and whether a read under updates is ever torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import Annotated, Final

import msgspec
import numpy as np
import typer

from qwengyre.bench.output import say
from qwengyre.bench.transports import TransportName, open_bench_transport
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.errors import StaleRead
from qwengyre.transfer.api import Exposure, Transport

PREFIX = "qwengyre-bench-weights"
PARAMETER_BYTES = 4 << 20
ROUNDS: Final = 2
"""How often a satellite reads the snapshot each time."""
SETTLE_S: Final = 0.002
"""Between two turns."""
READER = "from qwengyre.bench.weights import satellite; satellite()"


class ReadFigures(msgspec.Struct, frozen=True):
    transport: str
    snapshot_gb: float
    satellites: int
    snapshot_gb_per_s: float
    """All satellites together, each reading the whole snapshot, parameter by parameter."""
    raw_gb_per_s: float
    """The same readers and bytes, as one region, beside the same steps of the core."""
    share_of_raw: float
    core_slowdown: float
    """CPU time of a step of the core while satellites read, over one while they are stopped, less one; by turns."""
    snapshots: int
    good_reads: int
    stale_reads: int
    torn: int
    """Reads under concurrent updates that returned bytes of two versions. 0 is the only right figure."""


class SatelliteJob(msgspec.Struct, frozen=True):
    """What a satellite process is told."""

    transport: str
    exposure: Exposure
    cpus: list[int]
    """Where it may run."""


def weights(
    gigabytes: Annotated[float, typer.Option(min=0.001, help="Size of the snapshot.")] = 1.0,
    satellites: Annotated[int, typer.Option(min=1, help="Processes that read it.")] = 3,
    updates: Annotated[int, typer.Option(min=1, help="Snapshots published while others read.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; medians count.")] = 5,
    transport: TransportName = "shm",
    json_target: JsonTarget = None,
) -> None:
    """Read snapshots from several processes: speed against the bare transport, cost to the core, torn reads."""
    num_parameters = max(1, int(gigabytes * 1e9 / PARAMETER_BYTES))
    parameters = {f"layers.{index}.weight": np.full(PARAMETER_BYTES // 4, index, np.float32) for index in range(num_parameters)}
    step = BusyStep()
    raw_rates, rates, slowdowns = [], [], []
    with closing(open_bench_transport(transport, PREFIX)) as core:
        snapshot = core.expose(parameters, version=1, incarnation=1)
        raw = core.expose({"all": np.ones(snapshot.num_bytes, np.uint8)}, version=1, incarnation=1)
        del parameters
        for _ in range(repeats):
            raw_rates.append(read_by_satellites(raw, transport, satellites, step))
            rates.append(read_by_satellites(snapshot, transport, satellites, step))
            slowdowns += slowdowns_by(snapshot, transport, satellites, step)
    good, stale, torn = read_under_updates(transport, updates)
    raw_rate, rate, gb = median(raw_rates), median(rates), snapshot.num_bytes / 1e9
    slowdown = median(slowdowns)
    figures = ReadFigures(transport, gb, satellites, rate, raw_rate, rate / raw_rate, slowdown, updates, good, stale, torn)
    write_json(json_target, figures)
    say(f"{figures.snapshot_gb:.2f} GB to {satellites} satellites over {transport}: {rate:.2f} GB/s, raw {raw_rate:.2f} GB/s")
    say(f"share_of_raw {figures.share_of_raw:.2f}    core_slowdown {figures.core_slowdown:+.1%}")
    say(f"torn {torn} of {good + stale:,} reads under {updates:,} updates ({good:,} good, {stale:,} refused as stale)")


class Satellites:
    """Processes that read an exposure, once all are ready, on `cpus`."""

    def __init__(self, exposure: Exposure, transport: str, num: int, cpus: list[int]):
        job = msgspec.json.encode(SatelliteJob(transport, exposure, cpus))
        self._readers = [
            subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(num)
        ]
        for reader in self._readers:
            self._tell(reader, job)
            assert reader.stdout is not None and reader.stdout.readline() == b"ready\n"
        self._ended: list[float] = []
        self._waiters = [threading.Thread(target=self._wait, args=(reader,)) for reader in self._readers]
        self._began = time.perf_counter()
        for reader, waiter in zip(self._readers, self._waiters, strict=True):
            self._tell(reader, b"go")
            waiter.start()

    def is_reading(self) -> bool:
        return any(waiter.is_alive() for waiter in self._waiters)

    def signal(self, number: signal.Signals) -> None:
        for reader in self._readers:
            reader.send_signal(number)

    def seconds(self) -> float:
        """From the first word to the last byte."""
        assert len(self._ended) == len(self._readers), "a satellite failed: its error stands above"
        return max(self._ended) - self._began

    def _tell(self, reader: subprocess.Popen[bytes], line: bytes) -> None:
        assert reader.stdin is not None
        reader.stdin.write(line + b"\n")
        reader.stdin.flush()

    def _wait(self, reader: subprocess.Popen[bytes]) -> None:
        assert reader.stdout is not None
        if reader.stdout.readline() == b"done\n":
            self._ended.append(time.perf_counter())
        reader.communicate()


def read_by_satellites(exposure: Exposure, transport: str, num_satellites: int, step: BusyStep) -> float:
    """GB/s that all satellites read together, while this process computes step after step on a processor of its own."""
    with _on_first_cpu() as others:
        satellites = Satellites(exposure, transport, num_satellites, others)
        while satellites.is_reading():
            step.cpu_s()
    return num_satellites * ROUNDS * exposure.num_bytes / satellites.seconds() / 1e9


def slowdowns_by(exposure: Exposure, transport: str, num_satellites: int, step: BusyStep) -> list[float]:
    """CPU time of a step while satellites read over one while they are stopped, less one; by turns of some milliseconds."""
    with _on_first_cpu() as others:
        satellites = Satellites(exposure, transport, num_satellites, others)
        slowdowns = []
        while satellites.is_reading():
            busy_s = step.cpu_s()
            satellites.signal(signal.SIGSTOP)
            time.sleep(SETTLE_S)
            slowdowns.append(busy_s / step.cpu_s() - 1)
            satellites.signal(signal.SIGCONT)
            time.sleep(SETTLE_S)
    return slowdowns


@contextmanager
def _on_first_cpu() -> Iterator[list[int]]:
    """Keep this thread to one of its processors, and give the others; the same one when it has no other."""
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    os.sched_setaffinity(0, {first})
    try:
        yield others or [first]
    finally:
        os.sched_setaffinity(0, before)


def satellite() -> None:
    """The reader's process: take a job, allocate, read when told."""
    job = msgspec.json.decode(sys.stdin.readline(), type=SatelliteJob)
    os.sched_setaffinity(0, job.cpus)
    reader = open_bench_transport(job.transport, PREFIX)
    target = {region.name: np.ones(region.shape, region.dtype) for region in job.exposure.regions}
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(ROUNDS):
        reader.read(job.exposure, target)
    print("done", flush=True)


class BusyStep:
    """Something like a step of the core, on one thread: matrix products that stay in its cache."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def cpu_s(self) -> float:
        """CPU seconds of one."""
        began = time.thread_time()
        product = self._matrix
        for _ in range(20):
            product = (product @ self._matrix).tanh_()
        return time.thread_time() - began


def read_under_updates(transport: str, num_updates: int, num_readers: int = 2) -> tuple[int, int, int]:
    """Good, stale and torn reads while the owner publishes `num_updates` versions in place, at gaps of up to two reads."""
    owner = open_bench_transport(transport, PREFIX)
    zeros = np.zeros(100_000, np.int64)
    latest = [owner.expose({"first": zeros, "last": zeros}, version=0, incarnation=1)]
    gaps_s = np.random.default_rng(0).uniform(0, 2 * _read_s(transport, latest[0]), num_updates)
    stop, counts = threading.Event(), np.zeros((num_readers, 3), np.int64)

    def read_on(index: int) -> None:
        reader = open_bench_transport(transport, PREFIX)
        while not stop.is_set():
            counts[index, _outcome(reader, latest[0])] += 1
        reader.close()

    threads = [threading.Thread(target=read_on, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    for version in range(1, num_updates + 1):
        owner.begin_write(latest[0])
        for buffer in owner.buffers(latest[0]).values():
            buffer[:] = version
        latest[0] = owner.republish(latest[0], version=version)
        time.sleep(gaps_s[version - 1])
    stop.set()
    for thread in threads:
        thread.join()
    owner.close()
    good, stale, torn = counts.sum(0).tolist()
    return good, stale, torn


def _read_s(transport: str, exposure: Exposure) -> float:
    """How long a read takes."""
    reader = open_bench_transport(transport, PREFIX)
    reader.read(exposure)
    began = time.perf_counter()
    reader.read(exposure)
    elapsed = time.perf_counter() - began
    reader.close()
    return elapsed


def _outcome(reader: Transport, exposure: Exposure) -> int:
    """0 a whole snapshot of the version asked for, 1 refused as stale, 2 torn."""
    try:
        got = reader.read(exposure)
    except StaleRead:
        return 1
    return 0 if all(np.all(array == exposure.version) for array in got.values()) else 2
