"""What `qwengyre simulate` and `qwengyre plan` share: reading workloads, seeds and policies, and printing results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from qwengyre.cli.output import say
from qwengyre.config.load import parse_override
from qwengyre.core.errors import ConfigError
from qwengyre.dashboard.terminal import SafeConsole
from qwengyre.runtime.measured import measured_source
from qwengyre.scheduler.config import OrderName
from qwengyre.sim.compare import Report, effective
from qwengyre.sim.planner import Plan, plan_toml
from qwengyre.sim.results import Drawn, DurationSource, Result
from qwengyre.sim.settings import POLICY_NAMES, VARIANTS
from qwengyre.sim.units import TimeUnit, num_seeds, show_hours, unit_for
from qwengyre.sim.workload import Workload, load_workload, to_workload
from qwengyre.telemetry.folder import RunFolder

LEFT_OUT = "Evaluations, for which the run took time too, are left out."


def read_source(spec: str | None, run: Path | None, overrides: Sequence[str]) -> tuple[str, DurationSource]:
    """The name of a workload and where its durations come from. Raises ConfigError."""
    if run is not None:
        if spec is not None:
            raise ConfigError("give a workload or --from RUN, not both", key="WORKLOAD")
        source = measured_source(RunFolder.open(run))
        return run.name, source.with_workload(_overridden(source.workload, overrides))
    if spec is None:
        raise ConfigError("give a workload, nl122_v1 for instance, or --from RUN", key="WORKLOAD")
    name, workload = load_workload(spec)
    return name, Drawn(_overridden(workload, overrides))


def _overridden(workload: Workload, overrides: Sequence[str]) -> Workload:
    values = msgspec.structs.asdict(workload)
    for override in overrides:
        key, is_set, _ = override.partition("=")
        if not is_set or key not in values:
            raise ConfigError(f"{override!r} is not KEY=VALUE with one of {', '.join(values)}", key="--set")
        values[key] = parse_override(override)[1]
    return to_workload(values, file="--set")


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
        if name not in VARIANTS:
            raise ConfigError(f"{name!r} is not one of {', '.join(VARIANTS)}", key="--policy")
    return list(names or POLICY_NAMES)


def read_order(name: str) -> OrderName:
    """Raises ConfigError."""
    found: OrderName | None = next((order for order in get_args(OrderName) if order == name), None)
    if found is None:
        raise ConfigError(f"{name!r} is not one of {', '.join(get_args(OrderName))}", key="--order")
    return found


def print_table(report: Report, workload: Workload) -> None:
    """The comparison: time against the bounds, what it costs in staleness, moves and idle capacity, and where the gap comes from."""
    console = wide_console()
    title = f"{report.workload}: {workload.steps} steps on {workload.nodes} nodes, {num_seeds(report.seeds)}"
    time = _table(title, "policy", "time", "range", "ratio", "work bound", "path bound", "bound", "above")
    cost = _table("", "policy", "split", "staleness", "max", "token", "dropped", "moves", "idle rollout", "training")
    unit = unit_for(max(result.hours for result in report.results))
    parts = [name for name in report.results[0].gap_parts if any(_is_shown(unit, r.gap_parts[name]) for r in report.results)]
    gap = _table(f"Above the work bound, {unit.name} by cause", "policy", *(name.replace("_", " ") for name in parts), "all")
    for result in report.results:
        time.add_row(*_time_cells(result))
        cost.add_row(result.policy, _split(result, workload), *_cost_cells(result))
        in_all = result.hours - result.bound_work
        gap.add_row(result.policy, *(f"{unit.of(value):.1f}" for value in (*(result.gap_parts[p] for p in parts), in_all)))
    console.print(time)
    console.print(cost)
    console.print(gap)


def _is_shown(unit: TimeUnit, hours: float) -> bool:
    return abs(unit.of(hours)) >= 0.05


def print_plan(name: str, plan: Plan, workload: Workload) -> None:
    """The best settings, the Pareto front, what the winner saves on fresh seeds, and its TOML."""
    console = wide_console()
    console.print(f"{name}: no group staler than {plan.max_staleness} steps; {len(plan.tried)} settings tried")
    columns = (
        "cells",
        "standalone",
        "mu",
        "phi",
        "two-way",
        "backlog",
        "time",
        "range",
        "bound",
        "above",
        "staleness",
        "max",
        "saves",
    )
    best = _table("Best", *columns)
    best.add_row(*_plan_cells(plan.base, workload), "as it is")
    for result in plan.best:
        best.add_row(*_plan_cells(result, workload), f"{1 - result.hours / plan.base.hours:.1%}")
    front = _table("Pareto front of time against mean staleness", *columns)
    for result in plan.front:
        front.add_row(*_plan_cells(result, workload), f"{1 - result.hours / plan.base.hours:.1%}")
    console.print(best)
    console.print(front)
    console.print(f"No mu and phi under this cap ends before {show_hours(plan.least_bound)}: the least bound of all of them.")
    fresh = f"{show_hours(plan.fresh_base.hours)} -> {show_hours(plan.fresh_best.hours)}"
    console.print(
        f"On fresh seeds the first saves {plan.saving:.1%}: {fresh}, staleness at most {plan.fresh_best.staleness_max}.\n"
    )
    say(plan_toml(workload, plan.best[0].settings))


def _plan_cells(result: Result, workload: Workload) -> list[str]:
    setting = result.settings
    used = effective(workload, setting)
    cell_nodes = setting.cell_nodes or workload.cell_nodes
    return [
        f"{(workload.nodes - setting.standalone_nodes) // cell_nodes} x {cell_nodes}",
        str(setting.standalone_nodes or ""),
        str(used["steps_per_burst"]),
        f"{used['dispatch_depth']:g}",
        "yes" if setting.two_way else "",
        f"{setting.backlog:g}" if setting.backlog else "",
        show_hours(result.hours),
        f"{show_hours(result.hours_min)} - {show_hours(result.hours_max)}",
        show_hours(result.bound_joint),
        f"{result.gap:.1%}",
        f"{result.staleness_mean:.2f}",
        str(result.staleness_max),
    ]


def wide_console() -> Console:
    """As wide as the terminal; elsewhere wide enough for every column."""
    console = SafeConsole(soft_wrap=True)
    return console if console.is_terminal else SafeConsole(width=120, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _time_cells(result: Result) -> list[str]:
    return [
        result.policy,
        show_hours(result.hours),
        f"{show_hours(result.hours_min)} - {show_hours(result.hours_max)}",
        f"{result.ratio_to_elastic:.2f}" if result.ratio_to_elastic else "",
        show_hours(result.bound_work),
        show_hours(result.bound_path),
        show_hours(result.bound_joint),
        f"{result.gap:.1%}",
    ]


def _split(result: Result, workload: Workload) -> str:
    used = effective(workload, result.settings)
    words = (("training_nodes", "train"), ("standalone_nodes", "standalone"))
    return ", ".join(f"{used[key]} {word}" for key, word in words if used.get(key))


def _cost_cells(result: Result) -> list[str]:
    return [
        f"{result.staleness_mean:.2f}",
        str(result.staleness_max),
        f"{result.staleness_token:.2f}",
        f"{result.dropped:.0f}",
        f"{result.moves:.0f}",
        f"{result.idle_rollout:.0%}",
        f"{result.idle_training:.0%}",
    ]
