"""What became of each task over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.dashboard import svg
from qwengyre.dashboard.executions import ExecutionTable, GroupEntry
from qwengyre.dashboard.frame import drawn, render
from qwengyre.dashboard.open_run import OpenRun
from qwengyre.dashboard.run_pages import READING_S, frame_of, spark

MAX_TASKS: Final = 500
"""Rows of the table; the search finds the others."""


class GroupReward(msgspec.Struct, frozen=True):
    """How the executions of one group of a task ended."""

    group: GroupEntry
    is_greedy: bool
    rewards: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def spread(self) -> float:
        return max(self.rewards) - min(self.rewards)


class TaskHistory(msgspec.Struct, frozen=True):
    name: str
    groups: tuple[GroupReward, ...]
    """In the order of dispatch; those that nobody scored are left out."""

    @property
    def training(self) -> list[GroupReward]:
        return [one for one in self.groups if one.group.kind == "train"]

    @property
    def means(self) -> list[float]:
        return [one.mean for one in self.groups if not one.is_greedy]

    @property
    def best(self) -> float:
        return max(max(one.rewards) for one in self.groups)

    @property
    def num_mixed(self) -> int:
        return sum(one.spread > 0 for one in self.training)

    @property
    def verdict(self) -> tuple[str, str]:
        """In a word, and its color: whether it was ever solved, and by all of the last group at the training temperature."""
        if self.best <= 0:
            return "never above 0", "bad"
        if self.best < 1:
            return "never solved", "warn"
        sampled = [one for one in self.groups if not one.is_greedy] or self.groups
        last = sampled[-1].rewards
        return ("solved by all of the last group", "good") if min(last) >= 1 else ("solved at times", "run")


def task_history(table: ExecutionTable, name: str) -> TaskHistory:
    groups = []
    for number in sorted(table.tasks.get(name, ())):
        members = table.members(number)
        rewards = tuple(entry.counted_reward for entry in members if entry.counted_reward is not None)
        if rewards:
            groups.append(GroupReward(table.groups[number], any(entry.temperature == 0 for entry in members), rewards))
    return TaskHistory(name, tuple(groups))


SORTS: Final = {
    "name": lambda task: task.name,
    "last": lambda task: task.means[-1] if task.means else 0.0,
    "gain": lambda task: gain(task),
    "mixed": lambda task: task.num_mixed,
    "groups": lambda task: len(task.groups),
}


def gain(task: TaskHistory) -> float:
    """The last mean reward at the training temperature, less the first."""
    return task.means[-1] - task.means[0] if task.means else 0.0


def tasks_page(run: OpenRun, given: Mapping[str, str]) -> str:
    text, sort = given.get("text", "").strip().lower()[:200], given.get("sort", "last")
    sort, down = sort if sort in SORTS else "last", given.get("down", "0") != "0"
    with run.lock:
        is_read = run.table.refresh(READING_S)
        tasks = [task_history(run.table, name) for name in run.table.tasks if text in name.lower()]
    tasks = sorted((task for task in tasks if task.groups), key=SORTS[sort], reverse=down)
    rows = [(task, spark(task.means), gain(task)) for task in tasks[:MAX_TASKS]]
    num_never = sum(task.best <= 0 for task in tasks)
    num_flat = sum(bool(task.training) and not task.num_mixed for task in tasks)
    return render(
        "tasks.html",
        **frame_of(run, "Tasks") | ({} if is_read else {"live_s": 1}),
        rows=rows,
        num_tasks=len(tasks),
        num_never=num_never,
        num_flat=num_flat,
        text=text,
        sort=sort,
        down=down,
        share=1.0 if is_read else run.table.share_read,
    )


def task_page(run: OpenRun, given: Mapping[str, str]) -> str:
    name = given.get("name", "")
    with run.lock:
        run.table.refresh(READING_S)
        task = task_history(run.table, name)
    if not task.groups:
        raise ConfigError(f"no execution of a task {name!r} was scored in this run", file=run.name)
    frame: dict[str, Any] = frame_of(run, "Tasks", crumbs=[("tasks", f"/run/{quote(run.name)}/tasks"), (name, "")])
    return render("task.html", **frame, task=task, chart=drawn(history_chart(task)))


def history_chart(task: TaskHistory) -> str:
    """Every reward by policy version: hollow marks are executions, the line is the mean of each group at the training temperature."""
    width, height = 960.0, 260.0
    last = max(1, *(one.group.version for one in task.groups))
    rewards = [reward for one in task.groups for reward in one.rewards]
    plot = svg.Plot(64, 36, width - 88, height - 84, (0, last), (min(0.0, *rewards), max(1.0, *rewards)))
    kinds = (("held-out", "training groups"), ("greedy", "evaluations"))
    parts = svg.legend(64, 18, [(css, "line", name) for css, name in kinds])
    parts += svg.y_axis(plot, lambda value: f"{value:g}") + svg.x_axis(
        plot, lambda value: f"{value:g}", "policy version at the dispatch"
    )
    for css, groups in (("held-out", task.training), ("greedy", [one for one in task.groups if one.group.kind != "train"])):
        parts.append(svg.line(plot, [(one.group.version, one.mean) for one in groups if not one.is_greedy], css))
        for one in groups:
            hint = f"group {one.group.group}, version {one.group.version}: {_listed(one.rewards)}"
            parts += [
                svg.dot(plot, (one.group.version, reward), f"{css} faint", hint, 3.0) for reward in sorted(set(one.rewards))
            ]
            parts.append(svg.dot(plot, (one.group.version, one.mean), css, hint, 4.5))
    return svg.figure(width, height, parts, f"Rewards of {task.name}")


def _listed(rewards: Sequence[float]) -> str:
    return ", ".join(f"{reward:g}" for reward in rewards)
