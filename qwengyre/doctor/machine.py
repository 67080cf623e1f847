"""Examinations of the machine that this runs on."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import Final

from qwengyre.config.installation import to_have, to_have_vllm, to_repair
from qwengyre.core.errors import SandboxError
from qwengyre.doctor.finding import Examination, Finding, Verdict
from qwengyre.doctor.installed import installed_version

NEEDED: Final = ("torch", "transformers", "tokenizers", "renderers", "safetensors", "msgspec", "starlette", "uvicorn", "httpx")
OPTIONAL: Final = {
    "ray": f"for cells on several machines: {to_have('ray')}",
    "vllm": f"for engines on accelerators: {to_have_vllm()}",
}
MIN_MEMORY_GB: Final = 6.0
MIN_DISK_GB: Final = 5.0
MIN_SHM_GB: Final = 0.5
MIN_OPEN_FILES: Final = 4096
STA_UNSYNC: Final = 0x40


def python() -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    is_new = sys.version_info >= (3, 11)
    return [Finding("python", "ok" if is_new else "missing", version, "" if is_new else "install Python 3.11 or newer")]


def packages() -> list[Finding]:
    return [
        Finding(name, "ok", version)
        if (version := installed_version(name))
        else Finding(name, "missing", "not installed", f"run `{to_repair()}`")
        for name in NEEDED
    ]


def optional_packages() -> list[Finding]:
    return [
        Finding(name, "ok", version)
        if (version := installed_version(name))
        else Finding(name, "note", "not installed, and not needed on one machine with CPUs", todo)
        for name, todo in OPTIONAL.items()
    ]


def isolation() -> list[Finding]:
    """Whether harnesses can be isolated: a sandbox is started."""
    from qwengyre.sandbox.config import HarnessConfig
    from qwengyre.sandbox.preflight import check_harness

    found = shutil.which("bwrap")
    todo = 'install the package `bubblewrap`, or set harness.isolation = "none" for harnesses that you trust'
    if found is None:
        return [Finding("bubblewrap", "missing", "not found", todo)]
    try:
        check_harness(HarnessConfig(command=("bash",)))
    except SandboxError as error:
        return [Finding("bubblewrap", "missing", f"{found} cannot make a sandbox", str(error))]
    return [Finding("bubblewrap", "ok", f"{found}, a sandbox starts")]


def cores() -> list[Finding]:
    count = len(os.sched_getaffinity(0))
    enough = count >= 2
    return [Finding("cores", "ok" if enough else "note", f"{count}", "" if enough else "the quickstart is measured on 2 cores")]


def memory(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if found is None:
        return [Finding("memory", "note", f"{meminfo} does not say how much is free", "look with `free`")]
    available_gb = int(found[1]) * 1024 / 1e9
    enough = available_gb >= MIN_MEMORY_GB
    todo = "" if enough else f"the quickstart needs up to {MIN_MEMORY_GB:g} GB: fewer cells or harnesses need less"
    return [Finding("memory", "ok" if enough else "note", f"{available_gb:.1f} GB free", todo)]


def space() -> list[Finding]:
    """Room for run folders, and for snapshots and KV in shared memory."""
    findings = []
    for what, path, least_gb in (("disk", Path.cwd(), MIN_DISK_GB), ("shared memory", Path("/dev/shm"), MIN_SHM_GB)):
        if not path.exists():
            findings.append(Finding(what, "missing", f"no {path}", 'mount a tmpfs there, or set transfer.transport = "tcp"'))
            continue
        free_gb = shutil.disk_usage(path).free / 1e9
        enough = free_gb >= least_gb
        todo = "" if enough else f"free some: runs want {least_gb:g} GB there (a container: raise --shm-size)"
        findings.append(Finding(what, "ok" if enough else "note", f"{free_gb:.1f} GB free in {path}", todo))
    return findings


def open_files() -> list[Finding]:
    """Every live call and every harness holds a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    todo = "" if enough else f"`ulimit -n {MIN_OPEN_FILES}` (this user may up to {hard}) before hundreds of executions at once"
    return [Finding("open files", "ok" if enough else "note", f"at most {soft}", todo)]


def accelerators() -> list[Finding]:
    try:
        import torch
    except ImportError as error:  # missing, or a library of it is
        return [Finding("accelerator", "missing", f"torch cannot be imported: {error}", f"run `{to_repair()}`")]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found = ", ".join(f"{p.name} {p.total_memory / 1e9:.0f} GB" for p in names)
        return [Finding("accelerator", "ok", f"{found}; CUDA {torch.version.cuda}")]
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if devices:
        why = "torch is a CPU build" if torch.version.cuda is None else f"torch wants CUDA {torch.version.cuda}"
        todo = "install a CUDA build of torch that the driver (`nvidia-smi`) supports"
        return [Finding("accelerator", "missing", f"{', '.join(devices)} cannot be used: {why}", todo)]
    return [Finding("accelerator", "note", "none: engines and trainers run on the CPU")]


def ports() -> list[Finding]:
    """Whether processes can listen on the addresses that cells use: the loopback, and this host's own for others."""
    findings = []
    for what, host in (("loopback ports", "127.0.0.1"), ("host ports", own_host())):
        try:
            with socket.create_server((host, 0)) as server, socket.create_connection(server.getsockname()[:2], timeout=5):
                findings.append(Finding(what, "ok", f"{host} listens and answers"))
        except OSError as error:
            todo = "let processes of this machine listen on ports above 1024 and connect to each other (firewall, container)"
            verdict: Verdict = "missing" if host == "127.0.0.1" else "note"
            findings.append(Finding(what, verdict, f"{host} cannot be listened on or reached: {error}", todo))
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    enough = high - low >= 10_000
    todo = "" if enough else "widen net.ipv4.ip_local_port_range: every call and transfer takes a port for a while"
    findings.append(Finding("port range", "ok" if enough else "note", f"{low} to {high}", todo))
    return findings


def own_host() -> str:
    """The address that this machine shows to others; the loopback when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # of a datagram, nothing is sent by this
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def clock() -> list[Finding]:
    """Whether the kernel thinks that somebody sets its clock."""
    state = (ctypes.c_long * 32)()  # struct timex: modes, offset, freq, maxerror, esterror, status, ...
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        return [Finding("clock", "note", "the kernel does not say whether it is set", "compare `date` between machines")]
    if ctypes.c_int(state[5] & 0xFFFFFFFF).value & STA_UNSYNC:
        return [
            Finding(
                "clock", "note", "nothing sets it", "run chrony or another NTP client: times of several machines are compared"
            )
        ]
    return [Finding("clock", "ok", "synchronized")]


EXAMINATIONS: Final[tuple[Examination, ...]] = (
    python,
    packages,
    optional_packages,
    isolation,
    cores,
    memory,
    space,
    open_files,
    accelerators,
    ports,
    clock,
)
