"""The screen of a running `qwengyre train`: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qwengyre.core.text import one_line
from qwengyre.dashboard.hints import hint_of
from qwengyre.dashboard.terminal import SafeConsole
from qwengyre.dashboard.view import clock, quantity
from qwengyre.telemetry.summary import Summary
from qwengyre.telemetry.view import CellView, View

ROLE_STYLE: Final = {
    "rollout": ("rollout", "#3987e5"),
    "draining": ("draining", "#c98500"),
    "to_training": ("→ training", "#c98500"),
    "training": ("training", "#199e70"),
    "to_rollout": ("→ rollout", "#c98500"),
    "lost": ("lost", "#e66767"),
}
SPARKS: Final = "▁▂▃▄▅▆▇█"
NUM_MOMENTS: Final = 600  # more than a terminal is wide
MIN_CELLS_SHOWN: Final = 4
LINES_BESIDE_CELLS: Final = 10
MIN_STRIP: Final = 8
PLAIN_EVERY_S: Final = 15.0


class LiveScreen:
    """Shows one `View` after another; used as a context manager around the run."""

    def __init__(self, console: Console | None = None):
        self.console = console or SafeConsole()
        self._history = RoleHistory()
        self._view: View | None = None
        self._plain = PlainLines()
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None

    def __enter__(self) -> LiveScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, view: View) -> None:
        """Draw this moment. Call it a few times a second; it costs about a millisecond."""
        self._view = view
        self._history.observe(view)
        if self._live is not None:
            self._live.update(render(view, self._history, *self.console.size), refresh=True)
            return
        for line in self._plain.lines(view):
            self._print(line)

    def say(self, line: str) -> None:
        """Add a line that stays, above the view: an evaluation, a lost cell, a journal that was cut."""
        self._print(f"{clock(self._view.at) if self._view else '0:00'}  {one_line(line)}")

    def announce(self, line: str) -> None:
        """A line of ours, without a time."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, line: str) -> None:
        """Show progress before there is a view. On a terminal it stands until the next one."""
        if self._live is None:
            self._print(one_line(line))
        else:
            self._live.update(Text(one_line(line), overflow="ellipsis", no_wrap=True), refresh=True)

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


class RoleHistory:
    """The roles of each cell at evenly spaced moments, the newest last."""

    def __init__(self, every_s: float = 1.0):
        self.every_s = every_s
        self.roles: dict[int, deque[str]] = {}
        self._next_s = 0.0

    def observe(self, view: View) -> None:
        while view.at >= self._next_s:
            for cell in view.cells:
                self.roles.setdefault(cell.cell, deque(maxlen=NUM_MOMENTS)).append(cell.role)
            self._next_s = self._next_s + self.every_s if view.at - self._next_s < NUM_MOMENTS * self.every_s else view.at

    def strip(self, cell: int, width: int) -> Text:
        text = Text()
        for role, moments in groupby(list(self.roles.get(cell, ()))[-width:]):
            text.append("▄" * len(list(moments)), style=ROLE_STYLE[role][1])
        return text


def render(view: View, history: RoleHistory, width: int, height: int) -> RenderableType:
    """The whole screen, for a terminal of `width` columns and `height` lines: what finds no room is left out."""
    inner = min(width, 120) - 4
    parts: list[RenderableType] = [
        _progress(view, inner),
        _learning(view),
        Text(),
        _waterlevel(view, inner),
        _cells(view, history, inner, max(MIN_CELLS_SHOWN, height - LINES_BESIDE_CELLS)),
        Text(),
        _numbers(view),
    ]
    title = Text.assemble(("QwenGyre", "bold"), f"  {view.name} · {view.policy}")
    left = f" · about {clock(view.remaining_s)} left" if view.remaining_s is not None else ""
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=f"{clock(view.at)}{left}",
        subtitle_align="right",
        width=min(width, 120),
    )


def _progress(view: View, width: int) -> Text:
    text = Text.assemble((f"{view.doing:<12}", "bold"))
    length = max(10, width - 34)
    done = round(length * view.step / max(1, view.num_steps))
    text.append("━" * done, style="#3987e5")
    text.append("━" * (length - done), style="grey37")
    text.append(f"  step {view.step} of {view.num_steps}")
    return text


def _learning(view: View) -> Text:
    text = Text("score       ")
    if view.rewards:
        text.append("reward ")
        text.append(f"{view.rewards[-1]:.2f}", style="bold")
        text.append(f"  {sparkline(view.rewards[-20:])}   ", style="#3987e5")
    if view.score_now is not None:
        text.append("held-out ")
        text.append(f"{view.score_now:.2f}", style="bold")
        if view.score_before is not None and view.version > 0:
            text.append(f", was {view.score_before:.2f}")
    elif not view.rewards:
        text.append("none yet", style="dim")
    return text


def _waterlevel(view: View, width: int) -> Text:
    length = max(10, width - 34)
    most = max(view.max_capacity, view.waterlevel, 1)
    level, capacity = round(length * view.waterlevel / most), round(length * view.capacity / most)
    text = Text(f"{'waterlevel':<12}")
    served, room = min(level, capacity), max(0, capacity - level)
    text.append("█" * served, style="#3987e5")
    text.append("█" * (level - served), style="#c98500")
    text.append("░" * room, style="grey50")
    text.append(" " * (length - level - room))
    text.append(f"  {view.waterlevel}, room for {view.capacity}")
    return text


def _cells(view: View, history: RoleHistory, width: int, most: int) -> RenderableType:
    """A line a cell: name, role, roles so far, and calls where there is room. Beyond `most` lines a count of the rest."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    shown = view.cells if len(view.cells) <= most else view.cells[: most - 1]
    room = width - len(f"{'cell 0 core':<13}{'→ training':<12}")
    calls = _calls(shown)
    taken = max((len(text) for text in calls), default=0) + 2
    has_calls = any(calls) and room - taken >= MIN_STRIP
    if has_calls:
        room -= taken
    for row, cell in enumerate(shown):
        name, color = ROLE_STYLE[cell.role]
        label = f"cell {cell.cell}" + (" core" if cell.cell == 0 else "")
        strip = [history.strip(cell.cell, room)] if room >= MIN_STRIP else []
        more = [Text(calls[row])] if has_calls else []
        table.add_row(Text(f"{label:<11}"), Text(f"{name:<10}", style=f"bold {color}"), *strip, *more)
    rest = Counter(ROLE_STYLE[cell.role][0] for cell in view.cells[len(shown) :])
    if not rest:
        return table
    counts = ", ".join(f"{count} {role}" for role, count in rest.most_common())
    return Group(table, Text(f"and {rest.total()} more: {counts}", style="dim"))


def _calls(cells: Sequence[CellView]) -> tuple[str, ...]:
    return tuple(f"{cell.num_calls} calls" if cell.role in ("rollout", "draining") else "" for cell in cells)


def _numbers(view: View) -> Text:
    numbers = [
        (f"{view.groups_done}", "groups done"),
        (f"{view.groups_open}", "open"),
        (f"{view.executions_finished}", "executions done"),
        (f"{view.executions_running}", "running"),
        (quantity(view.tokens_per_s), "tokens/s"),
        (f"{view.memory_gb:.1f}", "GB"),
        (f"v{view.version}", ""),
    ]
    text = Text()
    for value, unit in numbers:
        text.append(value, style="bold")
        text.append(f" {unit}   ")
    return text


def sparkline(values: tuple[float, ...]) -> str:
    """
    >>> sparkline((0.0, 0.5, 1.0))
    '▁▅█'
    """
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in values)


class PlainLines:
    """For logs and pipes: a line at every step, evaluation and phase, and one every `PLAIN_EVERY_S`."""

    def __init__(self) -> None:
        self._shown: tuple[str, int, float | None] | None = None
        self._next_s = 0.0

    def lines(self, view: View) -> list[str]:
        state = (view.doing, view.step, view.score_now)
        if state == self._shown and view.at < self._next_s:
            return []
        self._shown, self._next_s = state, view.at + PLAIN_EVERY_S
        return [plain(view)]


def plain(view: View) -> str:
    """One line that says it all."""
    roles = "".join({"rollout": "R", "training": "T", "lost": "x"}.get(cell.role, "~") for cell in view.cells)
    parts = [
        f"{clock(view.at)}  {view.doing}  step {view.step}/{view.num_steps}",
        f"cells {roles}",
        f"waterlevel {view.waterlevel}/{view.capacity}",
        f"groups {view.groups_done}",
        f"{quantity(view.tokens_per_s)} tokens/s",
    ]
    if view.rewards:
        parts.append(f"reward {view.rewards[-1]:.2f}")
    if view.score_now is not None:
        parts.append(f"held-out {view.score_now:.2f}")
    if view.remaining_s is not None:
        parts.append(f"{clock(view.remaining_s)} left")
    return " · ".join(parts)


def outcome_table(summary: Summary) -> Table:
    """What to print when the run has ended."""
    table = Table(title="QwenGyre run", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    for name, value in outcome_rows(summary):
        table.add_row(name, Text(value), hint_of(name).verdict(summary))
    return table


def outcome_rows(summary: Summary) -> list[tuple[str, str]]:
    """Name and value, in words, of everything in the summary; shared by the end table and the report."""
    gap = summary.max_logprob_gap
    return [
        ("held-out score", _change(summary.score_before, summary.score_after)),
        ("held-out score, greedy", _change(summary.greedy_before, summary.greedy_after)),
        ("steps", f"{summary.steps} in {summary.minutes:.1f} minutes{_untrained(summary)}"),
        ("executions", f"{summary.executions_finished} finished, {summary.executions_lost} lost and dispatched again"),
        ("role switches", f"{summary.switches_to_training} to training, {summary.switches_to_rollout} to rollout"),
        (
            "calls moved in mid-generation",
            f"{summary.calls_moved} ({summary.tokens_recomputed_after_move} tokens computed again)",
        ),
        ("joins in mid-step", str(summary.joins_mid_step)),
        ("tokens recomputed at publishes", quantity(summary.tokens_recomputed_at_publish)),
        ("compactions", str(summary.compactions)),
        ("sub-agents", str(summary.sub_agents)),
        ("timeouts with a partial score", str(summary.timeouts_scored)),
        ("staleness", f"mean {summary.staleness_mean:.2f}, most {summary.staleness_max} steps"),
        ("clip fraction", f"{summary.clip_fraction:.3f}"),
        ("largest log-prob gap", "not audited" if gap is None else f"{gap:.1e}"),
        ("idle share of cells", f"{summary.idle_share:.0%}"),
        ("peak memory, all processes", f"{summary.peak_rss_gb:.2f} GB"),
    ]


def _untrained(summary: Summary) -> str:
    return f", {summary.steps_that_taught_nothing} of them taught nothing" if summary.steps_that_taught_nothing else ""


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        known = before if after is None else after
        return "not measured" if known is None else f"{known:.3f}"
    return f"{before:.3f} → {after:.3f} ({after - before:+.3f})"
