"""What looking at a large run costs: first answer, reading its journals, a page of them, memory, and the processor time of an open page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import httpx
import msgspec
import typer

from qwengyre.bench.made_up_run import MadeUpRun, write_made_up_run
from qwengyre.bench.output import say
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.errors import QwenGyreError
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord, Decided

PROGRAM: Final = "from qwengyre.cli.main import main; main()"
NUM_LOOKS: Final = 20
"""Of an open page, as it looks every three seconds: a minute of them."""
MAX_READS: Final = 2000


class DashboardFigures(msgspec.Struct):
    """Seconds of wall time, but for what says processor time."""

    executions: int
    first_answer_s: float
    """The table of executions, of a dashboard that has read nothing yet."""
    first_answer_cpu_s: float
    read_all_s: float
    """Until the table holds every execution."""
    read_all_cpu_s: float
    sorted_page_s: float
    conversation_s: float
    """Of an execution at the end of the journal, until it is shown."""
    unchanged_look_cpu_ms: float
    changed_look_cpu_ms: float
    memory_mb: float
    """Resident, at the end."""


def dashboard(
    executions: Annotated[int, typer.Option(min=100, help="Of the run that is made up.")] = 20_000,
    calls: Annotated[int, typer.Option(min=2, help="Of the main agent of each.")] = 3,
    folder: Annotated[Path, typer.Option(help="Where the run is made, and removed again.")] = Path("."),
    json_target: JsonTarget = None,
) -> None:
    """Browse a run of many executions as its journals lie on the disk: how long it takes, and what the dashboard holds in memory."""
    with tempfile.TemporaryDirectory(prefix=".bench-dashboard-", dir=folder) as scratch:
        say(f"making up a run of {executions:,} executions")
        run = write_made_up_run(Path(scratch), MadeUpRun(num_executions=executions, num_calls=calls))
        sizes = ", ".join(
            f"{path.name} {path.stat().st_size / 1e6:.0f} MB" for path in (run.controller_journal, run.gateway_journal)
        )
        say(sizes)
        figures = measure(Path(scratch), run.controller_journal, executions)
    for name in figures.__struct_fields__:
        say(f"{name:<24}{getattr(figures, name):>12,.3f}" if name != "executions" else f"{name:<24}{figures.executions:>12,}")
    write_json(json_target, figures)


def measure(runs_dir: Path, journal: Path, num_executions: int) -> DashboardFigures:
    """Start a dashboard as a process of its own and use it as a browser does."""
    with shown(runs_dir) as (client, pid):
        return _figures(client, pid, journal, num_executions)


@contextmanager
def shown(runs_dir: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A dashboard of `runs_dir` as a process of its own: a client that has its token, and its process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "dashboard", str(runs_dir), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = re.match(r"(http://\S+)/\?token=(\S+)", process.stdout.readline())
        if address is None:
            raise QwenGyreError("the dashboard did not start")
        with httpx.Client(base_url=address[1], follow_redirects=True, timeout=120) as client:
            client.get("/static/dashboard.css", params={"token": address[2]})
            yield client, process.pid
    finally:
        process.terminate()
        process.wait()


def _figures(client: httpx.Client, pid: int, journal: Path, num_executions: int) -> DashboardFigures:
    table = "/run/made-up/executions"
    began, began_cpu_s = time.perf_counter(), cpu_s(pid)
    page = _get(client, table)
    first_answer_s, first_answer_cpu_s = time.perf_counter() - began, cpu_s(pid) - began_cpu_s
    for _ in range(MAX_READS):
        if "Still reading" not in page.text:
            break
        page = _get(client, table)
    read_all_s, read_all_cpu_s = time.perf_counter() - began, cpu_s(pid) - began_cpu_s
    sorted_page_s = _seconds(client, f"{table}?sort=reward&page={num_executions // 100}")
    last = re.findall(r"data-open>(e\d+-\d+)<", _get(client, f"{table}?sort=id").text)[0]
    began = time.perf_counter()
    while "Still reading" in _get(client, f"{table}/{last}").text:
        pass
    conversation_s = time.perf_counter() - began
    tag = _get(client, table).headers["etag"]
    unchanged = _cpu_ms(pid, lambda: client.get(table, headers={"if-none-match": tag}))
    with Journal.open(journal, ControllerRecord) as growing:

        def look() -> None:
            growing.append(Decided(()))
            _get(client, table)

        changed = _cpu_ms(pid, look)
    return DashboardFigures(
        executions=num_executions,
        first_answer_s=first_answer_s,
        first_answer_cpu_s=first_answer_cpu_s,
        read_all_s=read_all_s,
        read_all_cpu_s=read_all_cpu_s,
        sorted_page_s=sorted_page_s,
        conversation_s=conversation_s,
        unchanged_look_cpu_ms=unchanged,
        changed_look_cpu_ms=changed,
        memory_mb=_resident_bytes(pid) / 1e6,
    )


def _get(client: httpx.Client, path: str) -> httpx.Response:
    return client.get(path).raise_for_status()


def _seconds(client: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    _get(client, path)
    return time.perf_counter() - began


def _cpu_ms(pid: int, look: Callable[[], object]) -> float:
    """Processor time of the process for one look, mean over a minute of them."""
    before = cpu_s(pid)
    for _ in range(NUM_LOOKS):
        look()
    return (cpu_s(pid) - before) * 1000 / NUM_LOOKS


def cpu_s(pid: int) -> float:
    """Processor time that a process has used so far, without its children's."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
