"""Two or more runs side by side: curves, what differs in their configuration, the same tasks in each."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.dashboard import svg
from qwengyre.dashboard.charts import comparison
from qwengyre.dashboard.frame import drawn, render
from qwengyre.dashboard.open_run import OpenRun, RunsDir
from qwengyre.dashboard.run_pages import READING_S
from qwengyre.dashboard.series import RunSeries, thin
from qwengyre.dashboard.svg import Plot, Point
from qwengyre.dashboard.task_pages import TaskHistory, task_history
from qwengyre.dashboard.view import quantity
from qwengyre.telemetry.records import StepFinished

MAX_RUNS: Final = 6
"""As many as there are colors that can be told apart."""
MAX_TASKS: Final = 200
CURVES: Final[tuple[tuple[str, Callable[[StepFinished], float | None]], ...]] = (
    ("Reward", lambda step: step.reward_mean),
    ("Entropy, nats", lambda step: step.entropy),
    ("Gradient norm", lambda step: step.gradient_norm),
    ("Clip fraction", lambda step: step.clip_fraction),
    ("Staleness, steps", lambda step: step.staleness_mean),
    ("Seconds a step", lambda step: step.seconds),
    ("Tokens trained", lambda step: float(step.tokens_trained)),
    ("Groups with a spread", lambda step: step.num_mixed_groups),
)


class SettingRow(msgspec.Struct, frozen=True):
    key: str
    values: tuple[str, ...]
    """Of each run, "" where it has none."""


class TaskRow(msgspec.Struct, frozen=True):
    name: str
    cells: tuple[TaskHistory | None, ...]
    """Of each run; None where the task was not scored."""

    @property
    def distance(self) -> float:
        """Between the best and the worst last reward of any two runs."""
        last = [task.means[-1] for task in self.cells if task is not None and task.means]
        return max(last) - min(last) if len(last) > 1 else 0.0


def compare_page(runs: RunsDir, names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))[:MAX_RUNS]
    opened = [runs.open(name) for name in names]
    series = [run.series() for run in opened]
    others = [found.name for found in runs.found() if found.name not in names]
    values: dict[str, Any] = {"title": "Compare", "crumbs": [("compare", "")], "tabs": [], "live_s": 0}
    if len(opened) < 2:
        return render(
            "compare.html", **values, names=names, others=others, curves=[], settings=[], tasks=[], main=None, outcome=[]
        )
    return render(
        "compare.html",
        **values,
        names=names,
        others=others,
        main=drawn(comparison(series, by_time=False)),
        curves=[drawn(overlay(title, series, value)) for title, value in CURVES],
        settings=different_settings(opened),
        tasks=same_tasks(opened),
        outcome=[_outcome(run) for run in series],
    )


def overlay(title: str, series: Sequence[RunSeries], value: Callable[[StepFinished], float | None]) -> str:
    """One number of every run by step, a color each."""
    lines: list[list[Point]] = [
        [(float(step.step), float(found)) for step in run.steps if (found := value(step)) is not None] for run in series
    ]
    points = [point for line in lines for point in line] or [(0.0, 0.0)]
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    plot = Plot(46, 36, 246, 92, (1, max(2.0, *(x for x, _ in points))), (low, high if high > low else low + 1.0))
    parts = [svg.text(46, 20, title, "small-title"), *svg.y_axis(plot, quantity, 3)]
    parts += svg.x_axis(plot, lambda tick: f"{tick:g}", "steps", 4)
    for index, line in enumerate(lines):
        parts.append(svg.line(plot, thin(line, 300), f"series-{index}"))
    return svg.figure(304, 168, parts, title)


def different_settings(runs: Sequence[OpenRun]) -> list[SettingRow]:
    """Keys whose values are not equal in all runs. Raises ConfigError for a run file that cannot be read."""
    flat = [_flat(run) for run in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [SettingRow(key, tuple(one.get(key, "") for one in flat)) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def _flat(run: OpenRun) -> dict[str, str]:
    try:
        tables = tomllib.loads(run.folder.config.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"not valid TOML: {error}", file=str(run.folder.config)) from error
    found: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("", tables)]
    while waiting:
        prefix, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{prefix}.{key}" if prefix else key, inner) for key, inner in value.items()]
        else:
            found[prefix] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def same_tasks(runs: Sequence[OpenRun]) -> list[TaskRow]:
    """Tasks that at least two runs scored, those first in which they ended furthest apart."""
    found: list[dict[str, TaskHistory]] = []
    for run in runs:
        with run.lock:
            run.table.refresh(READING_S)
            found.append({name: task for name in run.table.tasks if (task := task_history(run.table, name)).groups})
    names = sorted({name for one in found for name in one})
    rows = [TaskRow(name, tuple(one.get(name) for one in found)) for name in names]
    rows = [row for row in rows if sum(cell is not None for cell in row.cells) > 1]
    return sorted(rows, key=lambda row: -row.distance)[:MAX_TASKS]


def _outcome(run: RunSeries) -> list[tuple[str, str]]:
    first, last = (run.evaluations[0], run.evaluations[-1]) if run.evaluations else (None, None)
    return [
        ("policy", run.policy),
        ("steps", str(len(run.steps))),
        ("held-out before", "" if first is None else f"{first.score:.3f}"),
        ("held-out after", "" if last is None else f"{last.score:.3f}"),
        ("greedy after", "" if last is None else f"{last.greedy:.3f}"),
        ("minutes", f"{run.end_s / 60:.1f}"),
        ("idle share of cells", f"{run.summary.idle_share:.0%}"),
        ("calls moved", str(run.summary.calls_moved)),
    ]
