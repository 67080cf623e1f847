"""The few SVG shapes that the charts are made of. Coordinates are pixels of the viewBox; colors are CSS classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from qwengyre.core.text import html_text

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""x, y, width, height"""


class Plot(msgspec.Struct, frozen=True):
    """A rectangle with data coordinates: maps values to pixels."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1.0) * self.width

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.top + self.height - (value - low) / ((high - low) or 1.0) * self.height

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def right(self) -> float:
        return self.left + self.width


def figure(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """A whole SVG element that scales with its container."""
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html_text(title)}" xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'


def line(plot: Plot, points: Sequence[Point], css: str) -> str:
    """Straight segments between data points."""
    if not points:
        return ""
    path = " L".join(f"{plot.x(x):.1f} {plot.y(y):.1f}" for x, y in points)
    return f'<path class="line {css}" d="M{path}"/>'


def steps(plot: Plot, points: Sequence[Point], css: str, *, area: bool = False) -> str:
    """A step function: each value holds until the next point, the last to the right edge."""
    if not points:
        return ""
    path = f"M{plot.x(points[0][0]):.1f} {plot.y(points[0][1]):.1f}"
    path += "".join(f" H{plot.x(x):.1f} V{plot.y(y):.1f}" for x, y in points[1:]) + f" H{plot.right:.1f}"
    if area:
        return f'<path class="area {css}" d="{path} V{plot.bottom:.1f} H{plot.x(points[0][0]):.1f} Z"/>'
    return f'<path class="line {css}" d="{path}"/>'


def dot(plot: Plot, point: Point, css: str, hint: str, radius: float = 4.0) -> str:
    """A data point with a tooltip; a ring of the page's color keeps it apart from lines."""
    x, y = plot.x(point[0]), plot.y(point[1])
    return f'<circle class="dot {css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{html_text(hint)}</title></circle>'


def bar(box: Box, css: str, hint: str, radius: float = 0.0) -> str:
    """A filled rectangle with a tooltip."""
    x, y, width, height = box
    corners = f' rx="{radius:g}"' if radius else ""
    return f'<rect class="fill {css}" x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"{corners}><title>{html_text(hint)}</title></rect>'


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html_text(content)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, css: str = "grid") -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def y_axis(plot: Plot, show: Callable[[float], str], count: int = 4) -> list[str]:
    """Hairlines with a number at the left of each."""
    parts = []
    for tick in ticks(*plot.y_range, count):
        parts += [
            rule(plot.left, plot.y(tick), plot.right, plot.y(tick)),
            text(plot.left - 8, plot.y(tick) + 4, show(tick), "tick", "end"),
        ]
    return parts


def x_axis(plot: Plot, show: Callable[[float], str], label: str, count: int = 8) -> list[str]:
    """Numbers below the plot and what they count, at the right end."""
    parts = [rule(plot.left, plot.bottom, plot.right, plot.bottom, "axis")]
    parts += [text(plot.x(tick), plot.bottom + 18, show(tick), "tick", "middle") for tick in ticks(*plot.x_range, count)]
    return [*parts, text(plot.right, plot.bottom + 34, label, "tick", "end")]


def legend(x: float, y: float, entries: Sequence[tuple[str, str, str]]) -> list[str]:
    """Entries of (css class, "line" or "fill", name) in a row from (x, y) on."""
    parts = []
    for css, kind, name in entries:
        swatch = (
            f'<path class="line {css}" d="M{x:.1f} {y - 4:.1f} h18"/>'
            if kind == "line"
            else bar((x, y - 10, 18, 12), css, name, 2)
        )
        parts += [swatch, text(x + 25, y, name, "label")]
        x += 25 + 7.0 * len(name) + 26
    return parts


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers within [low, high], about `count` of them.

    >>> ticks(0.0, 1.0, 4)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> ticks(0, 37, 4)
    [0, 10, 20, 30]
    """
    if high <= low:
        return [low]
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = min((m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999), default=raw)
    if isinstance(low, int) and isinstance(high, int):
        step = max(1, round(step))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, count: int) -> list[float]:
    """Multiples of a round span of time from 0 up to `seconds`.

    >>> time_ticks(500.0, 8)
    [0, 60, 120, 180, 240, 300, 360, 420, 480]
    """
    spans = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
    span = next((span for span in spans if span * (count + 1) >= seconds), 86400)
    return [index * span for index in range(int(seconds / span) + 1)]
