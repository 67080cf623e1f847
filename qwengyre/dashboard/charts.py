"""The charts of the report, each a pure function from a run's series to SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from qwengyre.core.text import html_text
from qwengyre.dashboard import svg
from qwengyre.dashboard.hints import HEALTH
from qwengyre.dashboard.series import RunSeries, alike, thin
from qwengyre.dashboard.svg import Plot, Point
from qwengyre.dashboard.view import clock, quantity
from qwengyre.telemetry.records import PlanAdopted

WIDTH: Final = 960.0
LEFT: Final = 64.0
RIGHT: Final = 24.0
ROW: Final = 26.0
GAP: Final = 6.0
CHARACTER: Final = 8.0
"""Units that a character of a label takes at most, on average over the characters of a word."""
MOST_POINTS: Final = 900
MOST_STEP_MARKS: Final = 120

ROLES: Final = {
    "rollout": ("rollout", "rollout"),
    "training": ("training", "training"),
    "draining": ("transit", "draining"),
    "to_training": ("transit", "to training"),
    "to_rollout": ("transit", "to rollout"),
    "lost": ("lost", "lost"),
}
"""Role -> CSS class and name."""
ROLE_LEGEND: Final = (
    ("rollout", "fill", "rollout"),
    ("training", "fill", "training"),
    ("transit", "fill", "changing role"),
    ("lost", "fill", "lost"),
)


def scores(run: RunSeries) -> str:
    """Reward by step: training executions, held-out tasks at the training temperature, held-out greedy."""
    height, top = 330.0, 40.0
    values = [step.reward_mean for step in run.steps] + [s for e in run.evaluations for s in (e.score, e.greedy)]
    last = max([step.step for step in run.steps] + [e.version for e in run.evaluations] + [1])
    plot = Plot(LEFT, top, WIDTH - LEFT - 110, height - top - 48, (0, last), (min(0.0, *values, 0.0), max(1.0, *values, 1.0)))
    parts = svg.legend(
        LEFT,
        18,
        [("held-out", "line", "held-out tasks"), ("greedy", "line", "held-out, greedy"), ("muted", "line", "training tasks")],
    )
    parts += svg.y_axis(plot, lambda value: f"{value:g}") + svg.x_axis(plot, lambda value: f"{value:g}", "optimizer steps")
    parts.append(svg.line(plot, [(step.step, step.reward_mean) for step in run.steps], "muted thin"))
    parts += [
        svg.dot(plot, (s.step, s.reward_mean), "muted", f"step {s.step}: reward {s.reward_mean:.3f}", 2.2) for s in run.steps
    ]
    greedy = [(e.version, e.greedy) for e in run.evaluations]
    held_out = [(e.version, e.score) for e in run.evaluations]
    parts.append(svg.line(plot, greedy, "greedy"))
    parts += [svg.dot(plot, point, "greedy", f"version {point[0]:g}: greedy {point[1]:.3f}") for point in greedy]
    parts.append(svg.line(plot, held_out, "held-out bold"))
    parts += [svg.dot(plot, point, "held-out", f"version {point[0]:g}: held-out {point[1]:.3f}", 4.5) for point in held_out]
    parts += _end_labels(plot, [("held-out", held_out), ("greedy", greedy)])
    return svg.figure(WIDTH, height, parts, "Reward by step")


def timeline(run: RunSeries) -> str:
    """Waterlevel against capacity above the roles of the cells, on one time axis; hairlines where a step ended."""
    cells = sorted({span.cell for span in run.spans})
    top, level_height = 40.0, 150.0
    rows_top = top + level_height + 22
    rows_height = len(cells) * (ROW + GAP)
    most = max([level.waterlevel for level in run.levels] + [level.capacity for level in run.levels] + [1])
    span = (0.0, max(run.end_s, 1.0))
    level = Plot(LEFT, top, WIDTH - LEFT - RIGHT, level_height, span, (0, most))
    rows = Plot(LEFT, rows_top, WIDTH - LEFT - RIGHT, rows_height, span, (0, 1))
    parts = svg.legend(LEFT, 18, [("water", "line", "waterlevel"), ("capacity", "line", "capacity in rollout"), *ROLE_LEGEND])
    parts += svg.y_axis(level, lambda value: f"{value:g}", 3)
    if len(run.steps) <= MOST_STEP_MARKS:
        parts += [svg.rule(level.x(step.at), top, level.x(step.at), rows.bottom, "mark") for step in run.steps]
    water = thin([(sample.at, sample.waterlevel) for sample in run.levels], MOST_POINTS)
    parts += [svg.steps(level, water, "water", area=True), svg.steps(level, water, "water")]
    parts.append(svg.steps(level, thin([(s.at, s.capacity) for s in run.levels], MOST_POINTS), "capacity"))
    for index, cell in enumerate(cells):
        parts.append(
            svg.text(LEFT - 8, rows_top + index * (ROW + GAP) + 17, "core" if cell == 0 else f"cell {cell}", "tick", "end")
        )
        for part in (part for part in run.spans if part.cell == cell):
            css, name = ROLES[part.role]
            hint = f"cell {cell}: {name} from {clock(part.start)} to {clock(part.end)} ({part.end - part.start:.1f} s)"
            parts.append(
                svg.bar(
                    (rows.x(part.start), rows_top + index * (ROW + GAP), rows.x(part.end) - rows.x(part.start), ROW), css, hint
                )
            )
    parts += _plan_row(run, rows, rows.bottom)
    bottom = rows.bottom + (ROW + GAP if run.plans else 0.0)
    parts += [svg.text(rows.x(t), bottom + 14, clock(t), "tick", "middle") for t in svg.time_ticks(run.end_s, 10)]
    return svg.figure(WIDTH, bottom + 24, parts, "Waterlevel and cell roles over time")


def plan_words(plan: PlanAdopted) -> str:
    """
    >>> plan_words(PlanAdopted(9.0, steps_per_burst=2, dispatch_depth=0.5, two_way=True, backlog=0.25, reason="", order="longest-first"))
    '2 steps a burst, 0.5 ahead, two-way, backlog 0.25, longest first'
    """
    more = [", two-way"] if plan.two_way else []
    more += [f", backlog {plan.backlog:g}"] if plan.backlog else []
    more += [", longest first"] if plan.order == "longest-first" else []
    steps = f"{plan.steps_per_burst} step{'s' if plan.steps_per_burst != 1 else ''} a burst"
    return f"{steps}, {plan.dispatch_depth:g} ahead{''.join(more)}"


def _plan_row(run: RunSeries, rows: Plot, top: float) -> list[str]:
    """Each plan of `scheduler.tune` from when it was made to the next one; nothing for a run without."""
    if not run.plans:
        return []
    parts = [svg.text(LEFT - 8, top + 17, "plan", "tick", "end")]
    ends = [plan.at for plan in run.plans[1:]] + [max(run.end_s, run.plans[-1].at)]
    for plan, end in zip(run.plans, ends, strict=True):
        left, width = rows.x(plan.at), max(2.0, rows.x(end) - rows.x(plan.at) - 2)
        hint = f"{clock(plan.at)}: {plan_words(plan)}; {plan.reason}"
        parts.append(svg.bar((left, top, width, ROW), "plan", hint, 2))
        label = f"{plan.steps_per_burst} x, {plan.dispatch_depth:g}"
        if width > CHARACTER * len(label):
            parts.append(svg.text(left + 5, top + 17, label, "tick"))
    return parts


def time_by_role(run: RunSeries) -> str:
    """For each cell and all together, the share of its time in each role."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in run.spans:
        css = ROLES[span.role][0]
        for row in ("core" if span.cell == 0 else f"cell {span.cell}", "all cells"):
            spent[row][css] += span.end - span.start
    names = [name for name in spent if name != "all cells"] + (["all cells"] if spent else [])
    parts = svg.legend(LEFT, 18, ROLE_LEGEND)
    width = WIDTH - LEFT - RIGHT
    for index, name in enumerate(names):
        y = 36 + index * (ROW + GAP)
        parts.append(svg.text(LEFT - 8, y + 17, name, "tick", "end"))
        total, x = sum(spent[name].values()) or 1.0, LEFT
        for css, _, role in ROLE_LEGEND:
            share = spent[name].get(css, 0.0) / total
            if share <= 0:
                continue
            hint = f"{name}: {role} {share:.1%}, {clock(spent[name][css])}"
            parts.append(svg.bar((x + 1, y, share * width - 2, ROW), css, hint, 2))
            if share * width > 46:
                parts.append(svg.text(x + share * width / 2, y + 17, f"{share:.0%}", "on-fill", "middle"))
            x += share * width
    return svg.figure(WIDTH, 40 + len(names) * (ROW + GAP), parts, "Time by role")


def small(title: str, points: Sequence[Point], show: Callable[[float], str], x_label: str) -> str:
    """A small chart of one number, with its last value beside the title and what is good below; `x_label` "time" makes seconds a clock."""
    width, height, left, top = 304.0, 168.0, 46.0, 40.0
    is_time = x_label == "time"

    def show_x(x: float) -> str:
        return clock(x) if is_time else f"{x:g}"

    x_values, y_values = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    first, low = 0.0 if is_time else min(x_values), min(0.0, *y_values, 0.0)
    high = max(y_values) if max(y_values) > low else low + 1.0
    x_range, y_range = (first, max(max(x_values), first + 1)), (low, high + (high - low) * 0.06)
    plot = Plot(left, top, width - left - 12, height - top - 40, x_range, y_range)
    last = show(points[-1][1]) if points else "-"
    parts = [svg.text(left, 20, title, "small-title"), svg.text(width - 12, 20, last, "small-value", "end")]
    parts += [*svg.y_axis(plot, show, 3), svg.rule(plot.left, plot.bottom, plot.right, plot.bottom, "axis")]
    marks = svg.time_ticks(x_range[1], 4) if is_time else svg.ticks(*x_range, 4)
    parts += [svg.text(plot.x(mark), plot.bottom + 16, show_x(mark), "tick", "middle") for mark in marks]
    parts += [svg.text(plot.right, plot.bottom + 31, x_label, "tick", "end"), svg.line(plot, thin(points, 300), "held-out")]
    if len(points) <= 80:
        parts += [svg.dot(plot, point, "held-out", f"{show_x(point[0])}: {show(point[1])}", 2.4) for point in points]
    return f'<div>{svg.figure(width, height, parts, title)}<p class="hint">{html_text(HEALTH[title])}</p></div>'


def health(run: RunSeries) -> list[str]:
    """The small charts: one per number that tells whether training is sound."""

    def by_step(field: str) -> list[Point]:
        values = [(step.step, getattr(step, field)) for step in run.steps]
        return [(number, value) for number, value in values if value is not None and math.isfinite(value)]

    def number(value: float) -> str:
        return f"{value:.3g}"

    return [
        small("Staleness, steps", by_step("staleness_mean"), number, "steps"),
        small("Token staleness, steps", by_step("token_staleness_mean"), number, "steps"),
        small("Clip fraction", by_step("clip_fraction"), number, "steps"),
        small("Largest log-ratio", by_step("log_ratio_max"), number, "steps"),
        small("Gradient norm", by_step("gradient_norm"), number, "steps"),
        small("Update norm", by_step("update_norm"), number, "steps"),
        small("Entropy, nats", by_step("entropy"), number, "steps"),
        small("Tokens of paths, by distinct token", by_step("deduplication"), number, "steps"),
        small("Seconds a step", by_step("seconds"), number, "steps"),
        small("Tokens generated / s", [(rate.at, rate.tokens_generated_per_s) for rate in run.rates], quantity, "time"),
        small("Memory, GB", [(rate.at, rate.memory_gb) for rate in run.rates], number, "time"),
    ]


def comparison(runs: Sequence[RunSeries], *, by_time: bool) -> str:
    """Several runs: lines are the reward on training tasks, bold for the mean of runs that differ by their seed; dots are held-out scores."""
    height, top = 380.0, 40.0
    groups = alike(runs)
    lines = {name: [_training(run, by_time) for run in members] for name, members in groups.items()}
    scores = {name: [_held_out(run, by_time) for run in members] for name, members in groups.items()}
    points = [point for curves in (*lines.values(), *scores.values()) for curve in curves for point in curve] or [(0.0, 0.0)]
    most = max(1.0, *(x for x, _ in points))
    plot = Plot(LEFT, top, WIDTH - LEFT - 150, height - top - 52, (0, most), (0.0, max(1.0, *(y for _, y in points))))
    names = [(f"series-{index}", "line", _counted(name, len(groups[name]))) for index, name in enumerate(groups)]
    parts = svg.legend(LEFT, 18, names) + svg.y_axis(plot, lambda value: f"{value:g}")
    parts.append(svg.text(plot.right, 22, "lines: training tasks, dots: held-out tasks", "tick", "end"))
    parts += svg.x_axis(plot, (lambda value: f"{value:g}"), "minutes" if by_time else "optimizer steps")
    for index, name in enumerate(groups):
        css, several = f"series-{index}", len(groups[name]) > 1
        parts += [svg.line(plot, curve, f"{css} {'thin faint' if several else 'bold'}") for curve in lines[name]]
        if several:
            parts.append(svg.line(plot, _mean_curve(lines[name]), f"{css} bold"))
        for run, curve in zip(groups[name], scores[name], strict=True):
            parts += [svg.dot(plot, point, css, f"{run.label}: held-out {point[1]:.3f}", 4.0) for point in curve]
    ends = [(name, _mean_curve(curves)) for name, curves in scores.items()]
    return svg.figure(WIDTH, height, parts + _end_labels(plot, ends), "Reward of several runs")


def _counted(name: str, num_runs: int) -> str:
    return f"{name} ({num_runs} runs)" if num_runs > 1 else name


def _training(run: RunSeries, by_time: bool) -> list[Point]:
    return [(step.at / 60 if by_time else step.step, step.reward_mean) for step in run.steps]


def _held_out(run: RunSeries, by_time: bool) -> list[Point]:
    return [(e.at / 60 if by_time else e.version, e.score) for e in run.evaluations]


def _mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over runs of the k-th point, as far as all runs have it."""
    return [
        (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
        for points in zip(*curves, strict=False)
    ]


def _fitted(text: str, units: float) -> str:
    """A label cut to what finds room: the legend, or what is pointed at, has it whole.

    >>> _fitted("0.55 quickstart, 12 steps", 138.0)
    '0.55 quickstart,…'
    """
    most = int(units / CHARACTER)
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _end_labels(plot: Plot, curves: Sequence[tuple[str, Sequence[Point]]]) -> list[str]:
    """The last value and name of each curve at the right edge, kept apart."""
    placed: list[float] = []
    parts = []
    for name, curve in sorted((c for c in curves if c[1]), key=lambda c: -c[1][-1][1]):
        y = plot.y(curve[-1][1]) + 4
        if placed and y < placed[-1] + 16:
            y = placed[-1] + 16
        placed.append(y)
        x = plot.x(curve[-1][0]) + 12
        parts.append(svg.text(x, y, _fitted(f"{curve[-1][1]:.2f} {name}", WIDTH - x), "label"))
    return parts
