"""`qwengyre doctor`: what this machine offers, what is missing and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
import typer

from qwengyre.core.errors import ConfigError, SandboxError

Verdict = Literal["ok", "note", "missing"]
NEEDED: Final = ("torch", "transformers", "tokenizers", "renderers", "safetensors", "msgspec", "starlette", "uvicorn", "httpx")
MIN_MEMORY_GB: Final = 6.0
MIN_DISK_GB: Final = 5.0
MIN_SHM_GB: Final = 0.5


class Finding(msgspec.Struct, frozen=True):
    what: str
    verdict: Verdict
    found: str
    todo: str = ""
    """What to do; empty when nothing is."""


def doctor() -> None:
    """Check what this machine offers for a run; exit code 2 when something that is needed is missing."""
    findings = [finding for examine in EXAMINATIONS for finding in examine()]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        color = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "missing": typer.colors.RED}[finding.verdict]
        verdict = typer.style(f"{finding.verdict:<8}", fg=color, bold=True)
        typer.echo(
            f"{verdict}{finding.what:<{width}}  {finding.found}"
            + (f"\n{'':8}{'':{width}}  {finding.todo}" if finding.todo else "")
        )
    missing = [finding.what for finding in findings if finding.verdict == "missing"]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")


def python() -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return [Finding("python", "ok" if sys.version_info >= (3, 11) else "missing", version)]


def packages() -> list[Finding]:
    findings = []
    for name in NEEDED:
        try:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "missing", "not installed", "run `make setup`"))
    return findings


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
    return [
        Finding(
            "cores", "ok" if count >= 2 else "note", f"{count}", "" if count >= 2 else "the quickstart is measured on 2 cores"
        )
    ]


def memory(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available_gb = int(values["MemAvailable"].split()[0]) * 1024 / 1e9
    enough = available_gb >= MIN_MEMORY_GB
    todo = "" if enough else f"the quickstart needs up to {MIN_MEMORY_GB:g} GB: fewer cells or harnesses need less"
    return [Finding("memory", "ok" if enough else "note", f"{available_gb:.1f} GB free", todo)]


def space() -> list[Finding]:
    """Room for run folders, and for snapshots and KV in shared memory."""
    findings = []
    for what, path, least_gb in (("disk", Path.cwd(), MIN_DISK_GB), ("shared memory", Path("/dev/shm"), MIN_SHM_GB)):
        if not path.exists():
            findings.append(Finding(what, "missing", f"no {path}", "snapshots and KV blocks move through it on one machine"))
            continue
        free_gb = shutil.disk_usage(path).free / 1e9
        enough = free_gb >= least_gb
        todo = "" if enough else f"free some: runs want {least_gb:g} GB there"
        findings.append(Finding(what, "ok" if enough else "note", f"{free_gb:.1f} GB free in {path}", todo))
    return findings


def accelerators() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("accelerator", "note", "none: engines and trainers run on the CPU")]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [Finding("accelerator", "ok", ", ".join(names))]


EXAMINATIONS: Final[tuple[Callable[[], list[Finding]], ...]] = (python, packages, isolation, cores, memory, space, accelerators)
