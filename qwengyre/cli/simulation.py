"""What `qwengyre simulate` and `qwengyre plan` share: reading workloads, seeds and policies, and printing results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from qwengyre.core.errors import ConfigError
from qwengyre.sim.compare import Report, effective
from qwengyre.sim.measured import measured_source
from qwengyre.sim.results import Drawn, Result, Source
from qwengyre.sim.settings import POLICY_NAMES
from qwengyre.sim.workload import Workload, load_workload
from qwengyre.telemetry.folder import RunFolder


def read_source(spec: str | None, run: Path | None, overrides: Sequence[str]) -> tuple[str, Source]:
    """The name of a workload and where its durations come from. Raises ConfigError."""
    if run is not None:
        if spec is not None:
            raise ConfigError("give a workload or --from RUN, not both", key="WORKLOAD")
        source = measured_source(RunFolder.open(run))
        return run.name, source.with_workload(_overridden(source.workload, overrides))
    if spec is None:
        raise ConfigError("give a workload, as in `qwengyre simulate nl122_v1`, or --from RUN", key="WORKLOAD")
    name, workload = load_workload(spec)
    return name, Drawn(_overridden(workload, overrides))


def _overridden(workload: Workload, overrides: Sequence[str]) -> Workload:
    values = msgspec.structs.asdict(workload)
    for override in overrides:
        key, is_set, text = override.partition("=")
        if not is_set or key not in values:
            raise ConfigError(f"{override!r} is not KEY=VALUE with one of {', '.join(values)}", key="--set")
        values[key] = text
    try:
        return msgspec.convert(values, Workload, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).removesuffix(" - at `$`"), key="--set") from None


def read_seeds(text: str) -> list[int]:
    """`5` is [0, 1, 2, 3, 4]; `7,8` is [7, 8]. Raises ConfigError."""
    try:
        seeds = [int(part) for part in text.split(",")] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise ConfigError(f"{text!r} names no seeds: write how many, or a list as in 7,8,9", key="--seeds")
    return seeds


def read_policies(names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in POLICY_NAMES:
            raise ConfigError(f"{name!r} is none of {', '.join(POLICY_NAMES)}", key="--policy")
    return list(names or POLICY_NAMES)


def write_text(path: Path, text: str) -> None:
    """Write a file, or the standard output for `-`. Raises ConfigError if it cannot be written."""
    if str(path) == "-":
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(path)) from error
    typer.echo(f"wrote {path}")


def show_hours(hours: float) -> str:
    """
    >>> show_hours(71.62), show_hours(0.21)
    ('71.6 h', '12.6 min')
    """
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def print_table(report: Report, workload: Workload) -> None:
    """The comparison, with each policy's settings and its distance from the bounds."""
    console = Console(soft_wrap=True)
    table = Table(
        title=f"{report.workload}: {workload.steps} steps on {workload.nodes} nodes, {len(report.seeds)} seeds",
        title_justify="left",
    )
    for column in (
        "policy",
        "time",
        "range",
        "ratio",
        "bound work / path",
        "above",
        "staleness mean / max / token",
        "dropped",
        "moves",
        "idle rollout / training",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column in ("policy", "time"))
    for result in report.results:
        table.add_row(*_row(result, workload))
    console.print(table)


def _row(result: Result, workload: Workload) -> list[str]:
    split = effective(workload, result.settings)
    nodes = [
        f"{split[key]} {word}"
        for key, word in (("training_nodes", "training"), ("standalone_nodes", "standalone"))
        if split.get(key)
    ]
    return [
        result.policy + (f" ({', '.join(nodes)})" if nodes else ""),
        show_hours(result.hours),
        f"{show_hours(result.hours_min)} - {show_hours(result.hours_max)}",
        f"{result.ratio_to_elastic:.2f}" if result.ratio_to_elastic else "",
        f"{show_hours(result.bound_work)} / {show_hours(result.bound_path)}",
        f"{result.gap:.1%}",
        f"{result.staleness_mean:.2f} / {result.staleness_max} / {result.staleness_token:.2f}",
        f"{result.dropped:.0f}",
        f"{result.moves:.0f}",
        f"{result.idle_rollout:.0%} / {result.idle_training:.0%}",
    ]
