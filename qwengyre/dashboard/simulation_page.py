"""The pictures of a comparison and of a plan: one HTML page each, with inline SVG and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qwengyre.core.text import html_text
from qwengyre.dashboard import page, svg
from qwengyre.dashboard.series import thin
from qwengyre.dashboard.svg import Plot
from qwengyre.sim.compare import Report, effective
from qwengyre.sim.meters import Timeline
from qwengyre.sim.planner import Plan, plan_toml
from qwengyre.sim.results import Result
from qwengyre.sim.settings import OURS, Setting
from qwengyre.sim.workload import Workload

WIDTH: Final = 960.0
LEFT: Final = 64.0
RIGHT: Final = 24.0
MOST_POINTS: Final = 700
MOST_ROWS: Final = 32
FRESH: Final = "fresh seeds"
CSS: Final = {
    "rollout": "rollout",
    "training": "training",
    "draining": "transit",
    "to_training": "transit",
    "to_rollout": "transit",
    "lost": "lost",
}


def comparison_page(report: Report, workload: Workload, timelines: Sequence[tuple[Result, Timeline]]) -> str:
    """Hours of all policies against the bounds, then where each one's time went."""
    longest = max(timeline.roles[-1].end if timeline.roles else 0.0 for _, timeline in timelines) / 3600
    body = [
        f"<h1>{report.workload}</h1>",
        f'<p class="sub">{workload.steps} steps on {workload.nodes} nodes, simulated with {len(report.seeds)} seeds by the scheduler '
        "that runs the cluster.</p>",
        page.section(
            "Time of each policy",
            "Whiskers span the seeds. The dashed lines are bounds that no policy can beat: all nodes busy all the time (work), "
            "and the longest chain that the dispatch rule forces (path), at elastic's settings.",
            hours_chart(report.results),
        ),
        page.section(
            "In numbers",
            "Staleness in steps; idle is the share of offered slots, and of training time.",
            _table(report, workload),
        ),
    ]
    for result, timeline in timelines:
        used = effective(workload, result.settings).items()
        where = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in used if not isinstance(value, bool))
        text = f"Seed {report.seeds[0]}; {where}. A cell may leave for training once the waterlevel fits the capacity that stays."
        body.append(page.section(result.policy, text, timeline_chart(timeline, longest)))
    return page.page(f"{report.workload}: simulated policies", body)


def plan_page(name: str, plan: Plan, workload: Workload) -> str:
    """Everything that the search tried, the Pareto front, and the winner to paste."""
    best = plan.best[0]
    saved = f"{plan.saving:.1%} of the time, on {FRESH} that nothing was chosen by"
    body = [
        f"<h1>{name}: plan</h1>",
        f'<p class="sub">No group staler than {plan.max_staleness} steps; {len(plan.tried)} settings simulated.</p>',
        page.tiles(
            [
                ("as it is", f"{plan.base.hours:.1f} h", f"{plan.base.hours_min:.1f} to {plan.base.hours_max:.1f}"),
                ("best", f"{best.hours:.1f} h", f"{best.hours_min:.1f} to {best.hours_max:.1f}"),
                ("saves", f"{plan.saving:.1%}", f"on {FRESH}"),
            ]
        ),
        page.section(
            "Time against mean staleness",
            "Each dot is a setting; hover to read it. On the line, nothing tried is both faster and fresher.",
            pareto_chart(plan.tried, plan.front, plan.base),
        ),
        page.section(
            "To paste into a run file", f"Saves {saved}.", f"<pre>{html_text(plan_toml(workload, best.settings))}</pre>"
        ),
    ]
    return page.page(f"{name}: plan", body)


def hours_chart(results: Sequence[Result]) -> str:
    """One bar a policy, with its spread, and both bounds."""
    row, gap, left = 26.0, 10.0, 240.0
    most = max(result.hours_max for result in results) * 1.08
    plot = Plot(left, 30, WIDTH - left - 60, len(results) * (row + gap), (0.0, most), (0, 1))
    parts = svg.x_axis(plot, lambda value: f"{value:g}", "hours")
    for index, result in enumerate(results):
        y = plot.top + index * (row + gap)
        hint = f"{result.policy}: {result.hours:.2f} h, {result.hours_min:.2f} to {result.hours_max:.2f}"
        css = "training" if result.policy == OURS else "rollout"
        parts += [
            svg.text(left - 10, y + 18, result.policy, "label", "end"),
            svg.bar((left, y, plot.x(result.hours) - left, row), css, hint, 3),
            svg.rule(plot.x(result.hours_min), y + row / 2, plot.x(result.hours_max), y + row / 2, "axis"),
            svg.text(plot.x(result.hours_max) + 8, y + 18, f"{result.hours:.1f}", "small-value"),
        ]
    bounds = sorted([(results[0].bound_work, "work"), (results[0].bound_path, "path")])
    for (bound, name), anchor, shift in zip(bounds, ("end", "start"), (-3, 3), strict=True):
        parts += [
            svg.rule(plot.x(bound), plot.top - 12, plot.x(bound), plot.bottom, "mark"),
            svg.text(plot.x(bound) + shift, plot.top - 14, f"{name} {bound:.1f}", "tick", anchor),
        ]
    return svg.figure(WIDTH, plot.bottom + 44, parts, "Hours of each policy")


def timeline_chart(timeline: Timeline, hours: float) -> str:
    """Waterlevel against capacity above the roles of the cells, on a time axis of `hours`."""
    cells = sorted({span.cell for span in timeline.roles})
    shown = cells if len(cells) <= MOST_ROWS else cells[:: -(-len(cells) // MOST_ROWS)]
    height = 20.0 if len(shown) <= 12 else 10.0
    most = max([sample.capacity for sample in timeline.levels] + [sample.waterlevel for sample in timeline.levels] + [1])
    own = max((span.end for span in timeline.roles), default=0.0) / 3600
    width = WIDTH - LEFT - RIGHT
    level = Plot(LEFT, 36, width * min(1.0, own / (hours or 1.0)), 110, (0.0, own or 1.0), (0, most))
    rows = Plot(LEFT, 164, width, len(shown) * (height + 3), (0.0, hours or 1.0), (0, 1))
    parts = svg.legend(LEFT, 18, [("water", "line", "waterlevel"), ("capacity", "line", "capacity in rollout"), *_ROLES])
    parts += svg.y_axis(level, lambda value: f"{value:g}", 3)
    parts += [svg.rule(level.x(at / 3600), level.top, level.x(at / 3600), rows.bottom, "mark") for at in timeline.publishes[:200]]
    water = thin([(sample.at / 3600, sample.waterlevel) for sample in timeline.levels], MOST_POINTS)
    capacity = thin([(sample.at / 3600, sample.capacity) for sample in timeline.levels], MOST_POINTS)
    parts += [
        svg.steps(level, water, "water", area=True),
        svg.steps(level, water, "water thin"),
        svg.steps(level, capacity, "capacity thin"),
    ]
    place = {cell: index for index, cell in enumerate(shown)}
    for cell, index in place.items():
        parts.append(
            svg.text(
                LEFT - 8, rows.top + index * (height + 3) + height - 3, "core" if cell == 0 else f"cell {cell}", "tick", "end"
            )
        )
    for span in timeline.roles:
        if span.cell in place:
            box = (
                rows.x(span.start / 3600),
                rows.top + place[span.cell] * (height + 3),
                rows.x(span.end / 3600) - rows.x(span.start / 3600),
                height,
            )
            hint = f"cell {span.cell}: {span.state} from {span.start / 3600:.2f} h for {(span.end - span.start) / 3600:.2f} h"
            parts.append(svg.bar(box, CSS[span.state], hint))
    parts += svg.x_axis(rows, lambda value: f"{value:g}", "hours")
    return svg.figure(WIDTH, rows.bottom + 40, parts, "Waterlevel and cell roles")


def pareto_chart(tried: Sequence[Result], front: Sequence[Result], base: Result) -> str:
    """Hours against mean staleness: all settings faintly, the Pareto front, the workload's own; not those twice as slow."""
    tried = [result for result in tried if result.hours <= 2 * base.hours] or list(tried)
    front = [result for result in front if result.hours <= 2 * base.hours] or list(front)
    x_most = max(result.staleness_mean for result in tried) * 1.1 or 1.0
    least, most = min(result.hours for result in tried), max(result.hours for result in tried)
    room = (most - least) * 0.08 or 1.0
    plot = Plot(LEFT, 36, WIDTH - LEFT - RIGHT, 330, (0.0, x_most), (max(0.0, least - room), most + room))
    names = [("muted", "line", "tried"), ("series-2", "line", "Pareto front"), ("series-1", "line", "as the workload is")]
    parts = svg.legend(LEFT, 18, names) + svg.y_axis(plot, lambda value: f"{value:g} h")
    parts += svg.x_axis(plot, lambda value: f"{value:g}", "mean staleness, steps")
    parts += [svg.dot(plot, (r.staleness_mean, r.hours), "muted faint", _hint(r), 2.5) for r in tried]
    parts.append(svg.line(plot, [(r.staleness_mean, r.hours) for r in front], "series-2"))
    parts += [svg.dot(plot, (r.staleness_mean, r.hours), "series-2", _hint(r)) for r in front]
    parts.append(svg.dot(plot, (base.staleness_mean, base.hours), "series-1", _hint(base), 5.5))
    return svg.figure(WIDTH, plot.bottom + 44, parts, "Hours against mean staleness")


def _hint(result: Result) -> str:
    setting = result.settings
    parts = [f"{result.hours:.2f} h", f"staleness {result.staleness_mean:.2f}, at most {result.staleness_max}"]
    parts += [f"{name} {value}" for name, value in _set(setting)]
    return ", ".join(parts)


def _set(setting: Setting) -> list[tuple[str, object]]:
    return [
        (name.replace("_", " "), getattr(setting, name))
        for name in setting.__struct_fields__
        if getattr(setting, name) not in (None, 0)
    ]


def _table(report: Report, workload: Workload) -> str:
    header = [
        "policy",
        "hours",
        "range",
        "ratio",
        "above bound",
        "staleness",
        "max",
        "tokens",
        "dropped",
        "moves",
        "idle rollout",
        "idle training",
    ]
    rows = [
        [
            r.policy,
            f"{r.hours:.2f}",
            f"{r.hours_min:.1f}\u2013{r.hours_max:.1f}",
            f"{r.ratio_to_elastic:.2f}" if r.ratio_to_elastic else "",
            f"{r.gap:.1%}",
            f"{r.staleness_mean:.2f}",
            str(r.staleness_max),
            f"{r.staleness_token:.2f}",
            f"{r.dropped:.0f}",
            f"{r.moves:.0f}",
            f"{r.idle_rollout:.0%}",
            f"{r.idle_training:.0%}",
        ]
        for r in report.results
    ]
    return page.table(header, rows, num_names=1)


_ROLES: Final = (("rollout", "fill", "rollout"), ("training", "fill", "training"), ("transit", "fill", "changing role"))
