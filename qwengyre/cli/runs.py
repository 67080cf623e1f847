"""`qwengyre runs [DIR]`: the runs of a folder, and room on its disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from qwengyre.cli.output import say, write_text
from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.dashboard.open_run import OpenRun, RunsDir
from qwengyre.dashboard.run_pages import short_state

DAY_S: Final = 86_400
GB: Final = 1e9
FINISHED: Final = "finished"


class RunRow(msgspec.Struct, frozen=True):
    """One line of the list, and of `--json`."""

    name: str
    state: str
    """As the dashboard says it: running, finished, interrupted ..., or what is wrong with the folder."""
    steps: int
    reward: float | None
    """Mean of the last step."""
    score_before: float | None
    score: float | None
    """On the held-out tasks, before and at the last evaluation."""
    size_bytes: int
    """On disk, of files that other names of the same bytes are counted with once."""
    age_s: float
    """Since anything was written to its metrics."""


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of run folders.")] = Path("runs"),
    prune: Annotated[
        bool, typer.Option("--prune", help="List what could be removed of runs that have ended; remove nothing.")
    ] = False,
    remove: Annotated[bool, typer.Option("--yes", help="With --prune: remove it.")] = False,
    keep: Annotated[int, typer.Option(min=0, help="With --prune: the newest runs, which stay.")] = 5,
    older_than: Annotated[float, typer.Option(min=0, metavar="DAYS", help="With --prune: only runs that are older.")] = 0.0,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="With --prune: of finished runs, the snapshots and all checkpoints but the last; records, report and policy stay.",
        ),
    ] = False,
    as_json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the list as JSON, `-` for the output.")] = "",
) -> None:
    """List the runs of a folder: how each stands, what it scored, what it takes on disk. With --prune, make room."""
    if not folder.is_dir():
        raise ConfigError("there is no such folder: name the one that --runs-dir of `qwengyre train` named", file=str(folder))
    found = RunsDir(folder)
    if remove and not prune:
        raise ConfigError("this is for --prune", key="--yes")
    if prune:
        _prune(found, keep, older_than, weights_only, remove)
        return
    rows = [row_of(found, run.name, run.path, run.modified) for run in found.found()]
    if as_json:
        write_text(Path(as_json), msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return
    if not rows:
        say(f"{folder}: no runs")
        return
    width = max(len(row.name) for row in rows)
    say(f"{'run':{width}}  {'state':12}  steps  reward  held-out         on disk       age")
    for row in rows:
        held_out = f"{_number(row.score_before)} -> {_number(row.score)}"
        say(
            f"{row.name:{width}}  {row.state[:12]:12}  {row.steps:5}  {_number(row.reward):>6}  {held_out:15}  {row.size_bytes / GB:6.2f} GB  "
            f"{row.age_s / DAY_S:6.1f} d"
        )


def row_of(found: RunsDir, name: str, path: Path, modified: float) -> RunRow:
    size, age = size_of([path]), max(0.0, time.time() - modified)
    try:
        series = found.open(name).series()
    except QwenGyreError as error:
        return RunRow(name, str(error), 0, None, None, None, size, age)
    last = series.steps[-1].reward_mean if series.steps else None
    summary = series.summary
    return RunRow(name, short_state(series)[0], len(series.steps), last, summary.score_before, summary.score_after, size, age)


def _prune(found: RunsDir, keep: int, older_than: float, weights_only: bool, remove: bool) -> None:
    total, now = 0, time.time()
    for run in found.found()[keep:]:
        if now - run.modified < older_than * DAY_S:
            continue
        opened = _opened(found, run.name)
        if opened is None or opened.is_running:
            say(f"{run.name}: stays, it {'cannot be read' if opened is None else 'is running'}")
            continue
        paths = _weights(opened) if weights_only else [run.path]
        size = size_of(paths)
        if not paths:
            continue
        total += size
        say(
            f"{run.name}: {'removed' if remove else 'would go'}, {'its older weights' if weights_only else 'all of it'}, {size / GB:.2f} GB"
        )
        for path in paths if remove else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    say(f"{total / GB:.2f} GB{'' if remove else ' in all; --yes removes it'}")


def _opened(found: RunsDir, name: str) -> OpenRun | None:
    try:
        return found.open(name)
    except QwenGyreError:
        return None


def _weights(run: OpenRun) -> list[Path]:
    """What a finished run needs no more: nothing of one that can still be resumed."""
    if short_state(run.series())[0] != FINISHED:
        return []
    checkpoints = sorted(run.folder.checkpoints.glob("step-*"))
    optimizers = sorted((run.folder.checkpoints / "optimizer").glob("*"))
    return [*run.folder.snapshot_files().values(), *checkpoints[:-1], *optimizers[:-1]]


def size_of(paths: Iterable[Path]) -> int:
    """Bytes on disk, hard links once; what goes while it is counted does not count."""
    seen: dict[tuple[int, int], int] = {}
    for path in paths:
        files = [path] if path.is_file() else [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        for file in files:
            try:
                status = file.lstat()
            except OSError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512  # st_blocks counts units of 512 bytes, on every system
    return sum(seen.values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
