"""Examinations of what moves weights and KV: RDMA devices, pinned memory, and the bandwidth between two cells."""

from __future__ import annotations

import ctypes.util
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from qwengyre.core.errors import ConfigError, TransferError
from qwengyre.doctor.finding import Examination, Finding
from qwengyre.doctor.installed import is_installed
from qwengyre.transfer.api import Exposure, Transport
from qwengyre.transfer.config import TransferConfig, TransportKind
from qwengyre.transfer.transports import open_transport

NUM_BYTES: Final = 64 << 20  # long enough to time, short enough for a check
NUM_READS: Final = 3
DEADLINE_S: Final = 30.0
TRANSPORTS: Final = ("shm", "tcp")
SLOW_GB_S: Final = 0.5  # 1 GB in two seconds


def hcas(infiniband: Path = Path("/sys/class/infiniband")) -> list[Finding]:
    """RDMA devices and the state of their ports."""
    devices = sorted(infiniband.iterdir()) if infiniband.exists() else []
    if not devices:
        todo = "" if not _has_nvidia() else 'between machines weights and KV go over TCP: transfer.transport = "tcp"'
        return [Finding("RDMA devices", "note", "none", todo)]
    findings = []
    for port in (port for device in devices for port in sorted((device / "ports").iterdir())):
        state, rate, link = ((port / name).read_text().strip() for name in ("state", "rate", "link_layer"))
        is_up = "ACTIVE" in state
        todo = "" if is_up else "bring the link up (`ibstat`, subnet manager, cable), or leave the device out"
        what = f"RDMA device {port.parent.parent.name}:{port.name}"
        findings.append(Finding(what, "ok" if is_up else "note", f"{state}, {rate}, {link}", todo))
    return [*findings, *_rdma_needs()]


def _rdma_needs() -> list[Finding]:
    findings = []
    if ctypes.util.find_library("ibverbs") is None:
        findings.append(Finding("libibverbs", "missing", "not found", "install the package `libibverbs1` (and `rdma-core`)"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        findings.append(
            Finding("locked memory", "missing", f"at most {soft} bytes", "`ulimit -l unlimited`: RDMA pins what it reads")
        )
    if not is_installed("mooncake"):
        todo = "install the Mooncake Transfer Engine (docs/transfer.md), or use TCP"
        findings.append(Finding("mooncake", "note", "not installed: RDMA devices stay unused", todo))
    if _has_nvidia() and not Path("/sys/module/nvidia_peermem").exists():
        findings.append(
            Finding(
                "GPUDirect", "note", "nvidia_peermem is not loaded", "`modprobe nvidia_peermem`: spares a copy through the host"
            )
        )
    return findings


def _has_nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


class Rate(msgspec.Struct, frozen=True):
    """A read of one exposure by another process."""

    gb_s: float
    """1e9 bytes a second, the fastest of a few reads."""
    num_wrong: int
    """Bytes that arrived other than they were."""


def expose(transport: TransportKind, host: str) -> tuple[Transport, Exposure]:
    """A transport that must be kept, and what it shows: bytes that count up."""
    made = open_transport(
        TransferConfig(transport=transport, deadline_s=DEADLINE_S), prefix=f"qg-doctor-{os.getpid()}", host=host
    )
    return made, made.expose({"bytes": _pattern()}, version=1, incarnation=0)


def measure(exposure: Exposure, host: str) -> Rate:
    """Read an exposure of another process. Raises TransferError."""
    transport = open_transport(
        TransferConfig(transport=msgspec.convert(exposure.transport, TransportKind), deadline_s=DEADLINE_S),
        prefix=f"qg-doctor-{os.getpid()}",
        host=host,
    )
    into = {"bytes": np.zeros(NUM_BYTES, np.uint8)}
    seconds = []
    try:
        for _ in range(NUM_READS):
            began = time.perf_counter()
            transport.read(exposure, into)
            seconds.append(time.perf_counter() - began)
    finally:
        transport.close()
    return Rate(NUM_BYTES / min(seconds) / 1e9, int(np.count_nonzero(into["bytes"] != _pattern())))


def _pattern() -> np.ndarray:
    return np.arange(NUM_BYTES, dtype=np.uint32).astype(np.uint8)


def bandwidth() -> list[Finding]:
    """Between two processes of this machine, by each transport that needs nothing."""
    return [_between_processes(transport) for transport in TRANSPORTS]


def _between_processes(transport: str) -> Finding:
    what = f"bandwidth by {transport}"
    with subprocess.Popen(
        [sys.executable, "-m", "qwengyre.doctor.transfers", transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:
            exposure = msgspec.json.decode(owner.stdout.readline(), type=Exposure)
            return rated(what, measure(exposure, "127.0.0.1"))
        except (TransferError, ConfigError, msgspec.DecodeError) as error:
            return Finding(
                what,
                "missing",
                f"two processes cannot read from each other: {error}",
                f"use another transfer.transport than {transport!r}",
            )
        finally:
            owner.stdin.close()


def rated(what: str, rate: Rate) -> Finding:
    found = f"{rate.gb_s:.2f} GB/s"
    if rate.num_wrong:
        return Finding(
            what, "missing", f"{rate.num_wrong} bytes arrived wrong", "do not train on this machine: memory or network is broken"
        )
    if rate.gb_s < SLOW_GB_S:
        return Finding(what, "note", found, "slow: a snapshot of 1 GB takes seconds; look for other load, or another network")
    return Finding(what, "ok", found)


EXAMINATIONS: Final[tuple[Examination, ...]] = (hcas, bandwidth)


def _main() -> None:
    """Expose until stdin closes."""
    transport, exposure = expose(msgspec.convert(sys.argv[1], TransportKind), "127.0.0.1")
    sys.stdout.buffer.write(msgspec.json.encode(exposure) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _main()
