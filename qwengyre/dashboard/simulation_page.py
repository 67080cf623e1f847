"""The pictures of a comparison and of a plan: one HTML page each, with inline SVG and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from qwengyre.core.text import html_text
from qwengyre.dashboard import page, svg
from qwengyre.dashboard.series import thin
from qwengyre.dashboard.svg import Plot
from qwengyre.sim.compare import Report, effective
from qwengyre.sim.meters import Timeline
from qwengyre.sim.planner import Plan, pareto, plan_toml
from qwengyre.sim.results import Result
from qwengyre.sim.settings import OURS, Setting
from qwengyre.sim.units import num_seeds, show_hours, unit_for
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
    """Time of all policies against the bounds, then where each one's time went."""
    longest = max(timeline.roles[-1].end if timeline.roles else 0.0 for _, timeline in timelines) / 3600
    body = [
        f"<h1>{report.workload}</h1>",
        f'<p class="sub">{workload.steps} steps on {workload.nodes} nodes, simulated with {num_seeds(report.seeds)} by the scheduler '
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
            _table(report),
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
                ("as it is", show_hours(plan.base.hours), _range(plan.base)),
                ("best", show_hours(best.hours), _range(best)),
                ("saves", f"{plan.saving:.1%}", f"on {FRESH}"),
            ]
        ),
        page.section(
            "Time against mean staleness",
            "Each dot is a setting, with the first seed; hover to read it. On the line, nothing tried is both faster and fresher.",
            pareto_chart(plan.tried, plan.first_base),
        ),
        page.section(
            "The front with all seeds",
            "The best of the dots, simulated with every seed: of these, none is both faster and fresher than another.",
            page.table(
                ["time", "range", "staleness", "max", "setting"], [_front_row(result) for result in plan.front], num_names=0
            ),
        ),
        page.section(
            "To paste into a run file", f"Saves {saved}.", f"<pre>{html_text(plan_toml(workload, best.settings))}</pre>"
        ),
    ]
    return page.page(f"{name}: plan", body)


def hours_chart(results: Sequence[Result]) -> str:
    """One bar a policy, with its spread, and both bounds."""
    row, gap, left = 26.0, 10.0, 240.0
    longest = max(result.hours_max for result in results)
    unit = unit_for(longest)
    plot = Plot(left, 30, WIDTH - left - 60, len(results) * (row + gap), (0.0, unit.of(longest) * 1.08), (0, 1))
    parts = svg.x_axis(plot, lambda value: f"{value:g}", unit.name)
    for index, result in enumerate(results):
        y = plot.top + index * (row + gap)
        hours, low, high = (unit.of(value) for value in (result.hours, result.hours_min, result.hours_max))
        hint = f"{result.policy}: {hours:.2f} {unit.sign}, {low:.2f} to {high:.2f}"
        css = "training" if result.policy == OURS else "rollout"
        parts += [
            svg.text(left - 10, y + 18, result.policy, "label", "end"),
            svg.bar((left, y, plot.x(hours) - left, row), css, hint, 3),
            svg.rule(plot.x(low), y + row / 2, plot.x(high), y + row / 2, "axis"),
            svg.text(plot.x(high) + 8, y + 18, f"{hours:.1f}", "small-value"),
        ]
    bounds = sorted([(unit.of(results[0].bound_work), "work"), (unit.of(results[0].bound_path), "path")])
    for (bound, name), anchor, shift in zip(bounds, ("end", "start"), (-3, 3), strict=True):
        parts += [
            svg.rule(plot.x(bound), plot.top - 12, plot.x(bound), plot.bottom, "mark"),
            svg.text(plot.x(bound) + shift, plot.top - 14, f"{name} {bound:.1f}", "tick", anchor),
        ]
    return svg.figure(WIDTH, plot.bottom + 44, parts, "Time of each policy")


def timeline_chart(timeline: Timeline, hours: float) -> str:
    """Waterlevel against capacity above the roles of the cells, on a time axis of `hours`."""
    cells = sorted({span.cell for span in timeline.roles})
    shown = cells if len(cells) <= MOST_ROWS else cells[:: -(-len(cells) // MOST_ROWS)]
    height = 20.0 if len(shown) <= 12 else 10.0
    most = max([sample.capacity for sample in timeline.levels] + [sample.waterlevel for sample in timeline.levels] + [1])
    own = max((span.end for span in timeline.roles), default=0.0) / 3600
    width = WIDTH - LEFT - RIGHT
    level = Plot(LEFT, 36, width * min(1.0, own / (hours or 1.0)), 110, (0.0, own or 1.0), (0, most))
    unit = unit_for(hours)
    rows = Plot(LEFT, 164, width, len(shown) * (height + 3), (0.0, hours or 1.0), (0, 1))
    axis = msgspec.structs.replace(rows, x_range=(0.0, unit.of(hours) or 1.0))
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
            since, lasting = unit.show(span.start / 3600, 2), unit.show((span.end - span.start) / 3600, 2)
            hint = f"cell {span.cell}: {span.state} from {since} for {lasting}"
            parts.append(svg.bar(box, CSS[span.state], hint))
    parts += svg.x_axis(axis, lambda value: f"{value:g}", unit.name)
    return svg.figure(WIDTH, rows.bottom + 40, parts, "Waterlevel and cell roles")


def pareto_chart(tried: Sequence[Result], base: Result) -> str:
    """Time against mean staleness, all of the same seed: all settings faintly, the line of those that none of them beats in both, the
    workload's own; not those twice as slow."""
    shown = [result for result in (*tried, base) if result.hours <= 2 * base.hours]
    unit = unit_for(max(result.hours for result in shown))

    def point(result: Result) -> svg.Point:
        return result.staleness_mean, unit.of(result.hours)

    front = pareto(shown)
    x_most = max(result.staleness_mean for result in shown) * 1.1 or 1.0
    least, most = min(unit.of(result.hours) for result in shown), max(unit.of(result.hours) for result in shown)
    room = (most - least) * 0.08 or 1.0
    plot = Plot(LEFT, 36, WIDTH - LEFT - RIGHT, 330, (0.0, x_most), (max(0.0, least - room), most + room))
    names = [("muted", "line", "tried"), ("series-2", "line", "Pareto front"), ("series-1", "line", "as the workload is")]
    parts = svg.legend(LEFT, 18, names) + svg.y_axis(plot, lambda value: f"{value:g} {unit.sign}")
    parts += svg.x_axis(plot, lambda value: f"{value:g}", "mean staleness, steps")
    parts += [svg.dot(plot, point(result), "muted faint", _hint(result), 2.5) for result in shown]
    parts.append(svg.line(plot, [point(result) for result in front], "series-2"))
    parts += [svg.dot(plot, point(result), "series-2", _hint(result)) for result in front]
    parts.append(svg.dot(plot, point(base), "series-1", _hint(base), 5.5))
    return svg.figure(WIDTH, plot.bottom + 44, parts, "Time against mean staleness")


def _hint(result: Result) -> str:
    time = unit_for(result.hours).show(result.hours, 2)
    parts = [time, f"staleness {result.staleness_mean:.2f}, at most {result.staleness_max}", _named(result.settings)]
    return ", ".join(part for part in parts if part)


def _range(result: Result) -> str:
    return f"{show_hours(result.hours_min)} to {show_hours(result.hours_max)}"


def _front_row(result: Result) -> list[str]:
    staleness = [f"{result.staleness_mean:.2f}", str(result.staleness_max)]
    return [show_hours(result.hours), _range(result), *staleness, _named(result.settings) or "as it is"]


def _named(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in _set(setting))


def _set(setting: Setting) -> list[tuple[str, object]]:
    return [
        (name.replace("_", " "), getattr(setting, name))
        for name in setting.__struct_fields__
        if getattr(setting, name) not in (None, 0)
    ]


def _table(report: Report) -> str:
    header = [
        "policy",
        "time",
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
            unit_for(r.hours).show(r.hours, 2),
            _range(r),
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
