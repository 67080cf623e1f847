"""The list of runs, and the pages of one run: what it did as a whole, its executions, its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from markupsafe import Markup

from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.core.ids import GroupId
from qwengyre.dashboard import svg
from qwengyre.dashboard.execution_query import ExecutionQuery, find_page
from qwengyre.dashboard.executions import ExecutionTable
from qwengyre.dashboard.frame import drawn, render
from qwengyre.dashboard.open_run import OpenRun, RunInFolder, RunsDir, open_run_costs
from qwengyre.dashboard.report import report_sections, state_of
from qwengyre.dashboard.series import RunSeries
from qwengyre.dashboard.text_search import MAX_HITS
from qwengyre.telemetry.records import FINISHED

LIVE_S: Final = 3
"""Seconds between two looks of an open page at a run in progress."""
MIN_SEARCH_CHARS: Final = 2
READING_S: Final = 0.5
"""Longest time that one answer spends on reading a journal; the page looks again at once."""

TABS: Final = (
    ("Overview", ""),
    ("Executions", "executions"),
    ("Tasks", "tasks"),
    ("Search", "search"),
    ("Config", "config"),
    ("Logs", "logs"),
)
COLUMNS: Final = (
    ("execution", "id", ""),
    ("reward", "reward", "num"),
    ("task", "task", ""),
    ("end", "end", ""),
    ("group", "group", "num"),
    ("kind", "", ""),
    ("agents", "", ""),
    ("calls", "calls", "num"),
    ("tokens", "tokens", "num"),
    ("time", "time", "num"),
    ("version", "version", "num"),
    ("ended", "ended", "num"),
)


def frame_of(run: OpenRun, here: str, *, crumbs: Sequence[tuple[str, str]] = (), live: bool = True) -> dict[str, Any]:
    """What every page of a run needs. `here` names its tab."""
    base = f"/run/{quote(run.name)}"
    tabs = [(name, f"{base}/{path}") for name, path in TABS]
    return {
        "run": run,
        "title": f"{crumbs[-1][0] if crumbs else here} - {run.name}",
        "crumbs": [(run.name, f"{base}/"), *crumbs],
        "tabs": [(name, link, name == here) for name, link in tabs],
        "live_s": LIVE_S if live and run.is_running else 0,
    }


def runs_page(runs: RunsDir) -> str:
    rows = [_run_row(runs, found) for found in runs.found()]
    return render("runs.html", title="Runs", crumbs=[], tabs=[], live_s=LIVE_S, path=str(runs.path), rows=rows)


def _run_row(runs: RunsDir, found: RunInFolder) -> dict[str, Any]:
    try:
        run = runs.open(found.name)
        series = run.series()
    except QwenGyreError as error:
        return {"name": found.name, "problem": str(error)}
    summary, began = series.summary, series.began[-1] if series.began else None
    state, css = short_state(series)
    return {
        "name": found.name,
        "problem": "",
        "state": state,
        "state_class": css,
        "step": len(series.steps),
        "num_steps": began.num_steps if began else None,
        "reward": series.steps[-1].reward_mean if series.steps else None,
        "spark": spark([step.reward_mean for step in series.steps]),
        "score": summary.score_after,
        "score_before": summary.score_before,
        "executions": summary.executions_finished,
        "seconds": series.end_s,
        "policy": series.policy,
    }


def short_state(series: RunSeries) -> tuple[str, str]:
    """A word or two for how a run stands, and its color."""
    if series.ended is not None:
        return ("finished", "good") if series.ended.reason == FINISHED else (series.ended.reason[:40], "bad")
    if series.is_running:
        return "running", "run"
    return ("interrupted", "warn") if series.began else ("being prepared", "")


def spark(values: Sequence[float]) -> Markup:
    """A line of 90 by 22 pixels."""
    if len(values) < 2:
        return Markup("")
    plot = svg.Plot(2, 3, 86, 16, (0, len(values) - 1), (min(0.0, *values), max(1.0, *values)))
    return drawn(
        svg.figure(
            90, 22, [svg.line(plot, [(float(at), value) for at, value in enumerate(values)], "held-out thin")], "reward by step"
        )
    )


def overview_page(run: OpenRun) -> str:
    series = run.series()
    with run.lock:
        is_read = run.table.refresh(READING_S)
        costs = open_run_costs(run) if is_read else None
    sections = [drawn(part) for part in report_sections(series, costs)]
    return render("run.html", **frame_of(run, "Overview"), state=state_of(series), sections=sections)


def executions_page(run: OpenRun, given: Mapping[str, str]) -> str:
    query = ExecutionQuery.of(given)
    with run.lock:
        is_read = run.table.refresh(READING_S)
        mixed: frozenset[GroupId] = mixed_groups(run.table) if query.reward == "spread" else frozenset()
        page = find_page(run.table.executions.values(), run.table.groups, mixed, query)
        ends = sorted({entry.end for entry in run.table.executions.values()} | {"dropped", "placeholder"})
    frame = frame_of(run, "Executions")
    return render(
        "executions.html",
        **frame | ({} if is_read else {"live_s": 1}),
        query=query,
        page=page,
        columns=COLUMNS,
        ends=[(end, end.replace("_", " ")) for end in ends],
        share=1.0 if is_read else run.table.share_read,
    )


def search_page(run: OpenRun, given: Mapping[str, str]) -> str:
    text = given.get("q", "").strip()[:200]
    if len(text) < MIN_SEARCH_CHARS:
        return render("search.html", **frame_of(run, "Search", live=False), text=text, hits=[], share=1.0, is_full=False)
    decode = run.reader.decode if run.reader is not None else None
    if decode is None:
        raise ConfigError("this run has no tokenizer, so its tokens cannot be searched as text", file=run.name)
    with run.lock:
        search = run.searches.find(run.folder.gateway_journals, decode, text)
        search.go_on(READING_S)
        hits, share = list(search.hits), search.share_read
    frame = frame_of(run, "Search", live=False)
    is_full = len(hits) >= MAX_HITS
    return render(
        "search.html", **frame | ({"live_s": 1} if share < 1 else {}), text=text, hits=hits, share=share, is_full=is_full
    )


def mixed_groups(table: ExecutionTable) -> frozenset[GroupId]:
    """Groups whose rewards differ: the others have nothing to learn from."""
    seen: dict[int, float] = {}
    mixed: set[GroupId] = set()
    for entry in table.executions.values():
        reward = entry.counted_reward
        if reward is not None and seen.setdefault(entry.group, reward) != reward:
            mixed.add(entry.group)
    return frozenset(mixed)


def group_page(run: OpenRun, number: str) -> str:
    with run.lock:
        run.table.refresh(READING_S)
        group = run.table.groups.get(GroupId(int(number))) if number.isdecimal() and len(number) < 12 else None
        if group is None:
            raise ConfigError(f"there is no group {number} in this run", file=run.name)
        members = run.table.members(group.group)
        divide = bool(run.trajectory.divide_by_std)
        advantages = [run.table.advantage(entry.execution, divide_by_std=divide) for entry in members]
    rewards = [entry.counted_reward for entry in members if entry.counted_reward is not None]
    return render(
        "group.html",
        **frame_of(run, "Executions", crumbs=[("executions", f"/run/{quote(run.name)}/executions"), (f"group {number}", "")]),
        group=group,
        members=list(zip(members, advantages, strict=True)),
        verdict=_verdict(group.kind, len(members) == group.num_executions == len(rewards), rewards),
    )


def _verdict(kind: str, is_whole: bool, rewards: Sequence[float]) -> str:
    if not rewards:
        return "None of its executions has been scored yet."
    mean = f"Mean reward {sum(rewards) / len(rewards):.3f}, from {min(rewards):.2f} to {max(rewards):.2f}."
    if kind != "train" or not is_whole:
        return mean
    return f"{mean} All rewards are equal: there is nothing to learn from it." if min(rewards) == max(rewards) else mean
