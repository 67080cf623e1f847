"""`qwengyre bench rivals`: how other systems share a pool, simulated beside ours under one cap on staleness, as a table and a picture.

How each was read stands in docs/rivals.md, whose table and picture this makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from qwengyre.bench.output import say
from qwengyre.bench.tuning import foreseen
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.dashboard import page, svg
from qwengyre.dashboard.svg import Plot
from qwengyre.sim.compare import splits
from qwengyre.sim.planner import plan
from qwengyre.sim.results import Drawn, DurationSource, Result, fastest, simulate, workers
from qwengyre.sim.settings import Setting
from qwengyre.sim.workload import builtin_workloads, load_workload

PANEL: Final = (440.0, 250.0)
"""Width and height of one workload's part of the picture, pixels."""
COLUMNS: Final = 2
SPREAD: Final = 0.7
"""Of the room of one step of staleness: what the systems of equal staleness stand apart."""
BAND: Final = 0.9
"""Around each staleness, of the same room: the line of the front falls at its left edge, so that no system stands below it."""
RATIOS: Final = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


class RivalResult(msgspec.Struct, frozen=True):
    """One system on one workload, at its best split. Hours are means over the seeds, staleness is in steps."""

    system: str
    hours: float
    staleness_mean: float
    staleness_max: int
    split: str


class Field(msgspec.Struct, frozen=True):
    """All systems on one workload."""

    workload: str
    max_staleness: int
    """The cap: what the workload's own setting shows."""
    placed: list[RivalResult]

    @property
    def front(self) -> list[RivalResult]:
        """Those that no other beats in time without being staler, the freshest first."""
        found: list[RivalResult] = []
        for one in sorted(self.placed, key=lambda one: (one.staleness_max, one.hours)):
            if not found or one.hours < found[-1].hours:
                found.append(one)
        return found


def rivals(
    workload: Annotated[list[str] | None, typer.Option(help="A workload; give it again for more. Default: all built-in.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to simulate on.")] = 1,
    picture: Annotated[Path | None, typer.Option(help="Write the picture here, as SVG.")] = None,
    json: JsonTarget = None,
) -> None:
    """Simulate each system's schedule at its best split, no group staler than what the workload's own setting shows."""
    found: list[Field] = []
    with workers(jobs) as pool:
        for spec in workload or builtin_workloads():
            name, loaded = load_workload(spec)
            found.append(field(name, Drawn(foreseen(loaded)), range(seeds), pool))
            say(table(found[-1]))
    if picture is not None:
        picture.write_text(draw(found))
    if json is not None:
        write_json(json, msgspec.to_builtins(found))


def systems(cap: int) -> dict[str, Setting]:
    """By name, all but elastic scheduling. The two that take no cap of their own show what they show."""
    ahead = Setting(steps_per_burst=1, dispatch_depth=float(cap), max_staleness=cap)
    one = Setting(steps_per_burst=1, dispatch_depth=1.0)

    def with_policy(setting: Setting, policy: str) -> Setting:
        return msgspec.structs.replace(setting, policy=policy)

    return {
        "synchronous, colocated": Setting(policy="colocate", steps_per_burst=1, dispatch_depth=0.0),
        "one step off (verl)": with_policy(one, "async"),
        "toggle, twice B active": with_policy(one, "toggle"),
        f"toggle, {cap + 1} B active, capped": with_policy(ahead, "toggle"),
        f"{cap} steps ahead, whole batches (prime-rl)": with_policy(ahead, "async"),
        "one part rolls out, one toggles (verl, dynamic)": with_policy(ahead, "toggle-standalone"),
        "one part rolls out, one toggles and streams (RLinf)": with_policy(ahead, "colocate-standalone-streaming"),
        f"two pools, samples as they come, η = {cap} (AReaL)": with_policy(ahead, "async-streaming"),
    }


def field(name: str, source: DurationSource, seeds: Sequence[int], pool: Executor) -> Field:
    """Every system on one workload."""
    own = simulate(source, [Setting()], seeds, pool)[0]
    cap = own.staleness_max
    placed = [
        _placed(system, fastest(source, splits(source.workload, setting), seeds, pool))
        for system, setting in systems(cap).items()
    ]
    planned = plan(source, seeds, pool, max_staleness=cap).best[0]
    return Field(name, cap, [*placed, _placed("elastic, the paper's setting", own), _placed("elastic, planned", planned)])


def _placed(system: str, result: Result) -> RivalResult:
    chosen = result.settings
    split = [f"{chosen.training_nodes} nodes train"] if chosen.training_nodes else []
    split += [f"{chosen.standalone_nodes} standalone"] if chosen.standalone_nodes else []
    return RivalResult(system, result.hours, result.staleness_mean, result.staleness_max, ", ".join(split))


def table(found: Field) -> str:
    """In Markdown, the slowest first; the numbers are those of the picture."""
    lines = [f"{found.workload}, cap {found.max_staleness}:", ""]
    lines += ["| | system | time | staleness, mean | max | split |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {number} | {one.system}{' *' if one in found.front else ''} | {one.hours:.1f} h | {one.staleness_mean:.2f} "
        f"| {one.staleness_max} | {one.split} |"
        for number, one in enumerate(found.placed, start=1)
    ]
    return "\n".join([*lines, ""])


def draw(fields: Sequence[Field]) -> str:
    """The picture: for each workload time against maximum staleness, with the line of those that none beats in both."""
    width, height = PANEL
    parts: list[str] = []
    for index, one in enumerate(fields):
        left, top = (index % COLUMNS) * width, (index // COLUMNS) * height
        parts += _panel(one, Plot(left + 56, top + 34, width - 76, height - 84, _staleness_range(one), _time_range(one)))
    bottom = -(-len(fields) // COLUMNS) * height + 20
    for index, placed in enumerate(fields[0].placed):
        row, column = index // COLUMNS, index % COLUMNS
        name = f"{index + 1}  {_name_for_all(placed.system, fields[0].max_staleness)}"
        parts.append(svg.text(20 + column * width, bottom + row * 20, name, "label"))
    rows = -(-len(fields[0].placed) // COLUMNS)
    figure = svg.figure(min(len(fields), COLUMNS) * width, bottom + rows * 20, parts, "Time against maximum staleness, by system")
    return page.standalone(figure)


def _name_for_all(system: str, cap: int) -> str:
    """A system's name with the cap as a letter: workloads differ in it."""
    return (
        system.replace(f"toggle, {cap + 1} B", "toggle, (D + 1) B")
        .replace(f"{cap} steps ahead", "D steps ahead")
        .replace(f"η = {cap}", "η = D")
    )


def _staleness_range(found: Field) -> tuple[float, float]:
    return -0.6, max(one.staleness_max for one in found.placed) + 0.6


def _time_range(found: Field) -> tuple[float, float]:
    """Logarithms of the ratio to the fastest."""
    return -0.06, math.log(max(one.hours for one in found.placed) / _least(found)) + 0.06


def _least(found: Field) -> float:
    return min(one.hours for one in found.placed)


def _panel(found: Field, plot: Plot) -> list[str]:
    least = _least(found)
    parts = [
        svg.text(plot.left, plot.top - 12, f"{found.workload}: fastest {least:.1f} h, cap D = {found.max_staleness}", "label")
    ]
    for ratio in RATIOS:
        if math.log(ratio) <= plot.y_range[1]:
            y = plot.y(math.log(ratio))
            parts += [svg.rule(plot.left, y, plot.right, y), svg.text(plot.left - 8, y + 4, f"{ratio:g} x", "tick", "end")]
    parts.append(svg.rule(plot.left, plot.bottom, plot.right, plot.bottom, "axis"))
    for steps in range(int(plot.x_range[1]) + 1):
        parts.append(svg.text(plot.x(steps), plot.bottom + 16, str(steps), "tick", "middle"))
    parts.append(svg.text(plot.right, plot.bottom + 32, "maximum staleness, steps", "tick", "end"))
    points = {one.system: _point(found, number, least) for number, one in enumerate(found.placed)}
    edges = [(one.staleness_max - BAND / 2, math.log(one.hours / least)) for one in found.front]
    parts.append(svg.steps(plot, edges, "series-2"))
    for number, one in enumerate(found.placed, start=1):
        point = points[one.system]
        css = "series-2" if one in found.front else "series-1" if one.system.startswith("elastic") else "muted"
        parts.append(svg.dot(plot, point, css, f"{one.system}: {one.hours:.1f} h, staleness at most {one.staleness_max}"))
        parts.append(svg.text(plot.x(point[0]), plot.y(point[1]) - 7, str(number), "tick", "middle"))
    return parts


def _point(found: Field, index: int, least: float) -> svg.Point:
    """Systems of equal staleness stand side by side, in their order."""
    one = found.placed[index]
    level = [number for number, other in enumerate(found.placed) if other.staleness_max == one.staleness_max]
    aside = SPREAD * ((level.index(index) + 0.5) / len(level) - 0.5)
    return one.staleness_max + aside, math.log(one.hours / least)
