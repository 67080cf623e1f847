"""Snapshots: how fast satellites read one, what it costs the core, and whether a read under updates is ever torn."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Annotated

import msgspec
import numpy as np
import typer

from qwengyre.bench.carriers import CarrierName, open_bench_carrier
from qwengyre.bench.output import JsonTarget, say, write_json
from qwengyre.core.errors import StaleRead
from qwengyre.transfer.api import Carrier, Exposure

PREFIX = "qwengyre-bench-weights"
PARAMETER_BYTES = 4 << 20
READER = "from qwengyre.bench.weights import satellite; satellite()"


class Figures(msgspec.Struct, frozen=True):
    carrier: str
    snapshot_gb: float
    satellites: int
    snapshot_gb_per_s: float
    """All satellites together, each reading the whole snapshot, parameter by parameter."""
    raw_gb_per_s: float
    """The same readers and bytes, as one region."""
    share_of_raw: float
    core_slowdown: float
    """CPU time of the core's step while satellites read, over that without readers."""
    snapshots: int
    good_reads: int
    stale_reads: int
    torn: int
    """Reads under concurrent updates that returned bytes of two versions. 0 is the only right figure."""


class Job(msgspec.Struct, frozen=True):
    """What a satellite process is told."""

    carrier: str
    exposure: Exposure
    rounds: int


def weights(
    gigabytes: Annotated[float, typer.Option(help="Size of the snapshot.")] = 1.0,
    satellites: Annotated[int, typer.Option(help="Processes that read it.")] = 3,
    updates: Annotated[int, typer.Option(help="Snapshots published while others read.")] = 1000,
    carrier: CarrierName = "shm",
    json_target: JsonTarget = None,
) -> None:
    """Read snapshots from several processes: speed against the bare carrier, cost to the core, torn reads."""
    core = open_bench_carrier(carrier, PREFIX)
    num_parameters = max(1, int(gigabytes * 1e9 / PARAMETER_BYTES))
    parameters = {f"layers.{index}.weight": np.full(PARAMETER_BYTES // 4, index, np.float32) for index in range(num_parameters)}
    snapshot = core.expose(parameters, version=1, epoch=1)
    raw = core.expose({"all": np.ones(snapshot.num_bytes, np.uint8)}, version=1, epoch=1)
    del parameters
    raw_rate, _ = read_by_satellites(raw, carrier, satellites)
    alone_s = step_cpu_s()
    rate, busy_s = read_by_satellites(snapshot, carrier, satellites)
    core.close()
    good, stale, torn = read_under_updates(carrier, updates)
    share, gb = rate / raw_rate, snapshot.num_bytes / 1e9
    figures = Figures(carrier, gb, satellites, rate, raw_rate, share, busy_s / alone_s - 1, updates, good, stale, torn)
    write_json(json_target, figures)
    say(f"{figures.snapshot_gb:.2f} GB to {satellites} satellites over {carrier}: {rate:.2f} GB/s, raw {raw_rate:.2f} GB/s")
    say(f"share_of_raw {figures.share_of_raw:.2f}    core_slowdown {figures.core_slowdown:+.1%}")
    say(f"torn {torn} of {good + stale:,} reads under {updates:,} updates ({good:,} good, {stale:,} refused as stale)")


def read_by_satellites(exposure: Exposure, carrier: str, num_satellites: int, rounds: int = 2) -> tuple[float, float]:
    """GB/s that all satellites read together, and the median CPU time of the core's step meanwhile."""
    job = msgspec.json.encode(Job(carrier, exposure, rounds))
    readers = [
        subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(num_satellites)
    ]
    for reader in readers:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(job + b"\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == b"ready\n"
    began = time.perf_counter()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write(b"go\n")
        reader.stdin.flush()
    step_s = step_cpu_s()
    for reader in readers:
        assert reader.stdout is not None and reader.stdout.readline() == b"done\n"
    elapsed = time.perf_counter() - began
    for reader in readers:
        reader.communicate()
    return num_satellites * rounds * exposure.num_bytes / elapsed / 1e9, step_s


def satellite() -> None:
    """The reader's process: take a job, allocate, read when told."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    reader = open_bench_carrier(job.carrier, PREFIX)
    target = {region.name: np.ones(region.shape, region.dtype) for region in job.exposure.regions}
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(job.rounds):
        reader.read(job.exposure, target)
    print("done", flush=True)


def step_cpu_s(num_steps: int = 15) -> float:
    """Median CPU time of something like a step of the core: matrix products that stay in its cache."""
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(256, 256)).astype(np.float32)
    times = []
    for _ in range(num_steps):
        began = time.thread_time()
        product = matrix
        for _ in range(20):
            product = np.tanh(product @ matrix)
        times.append(time.thread_time() - began)
    return float(np.median(times))


def read_under_updates(carrier: str, num_updates: int, num_readers: int = 2) -> tuple[int, int, int]:
    """Good, stale and torn reads while the owner publishes `num_updates` versions in place."""
    owner = open_bench_carrier(carrier, PREFIX)
    zeros = np.zeros(100_000, np.int64)
    latest = [owner.expose({"first": zeros, "last": zeros}, version=0, epoch=1)]
    stop, counts = threading.Event(), np.zeros((num_readers, 3), np.int64)

    def read_on(index: int) -> None:
        reader = open_bench_carrier(carrier, PREFIX)
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
        time.sleep(0)
    stop.set()
    for thread in threads:
        thread.join()
    owner.close()
    good, stale, torn = counts.sum(0).tolist()
    return good, stale, torn


def _outcome(reader: Carrier, exposure: Exposure) -> int:
    """0 a whole snapshot of the version asked for, 1 refused as stale, 2 torn."""
    try:
        got = reader.read(exposure)
    except StaleRead:
        return 1
    return 0 if all(np.all(array == exposure.version) for array in got.values()) else 2
