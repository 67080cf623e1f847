"""What a run cost: device hours by role, where its tokens went, sandbox hours, idle time by cause. Pure, from what the journals say.

Idle time is the run's `idle_share` (`telemetry/meters.py`) of all cell time. Its causes are taken out of it one by one:

    lost       cells that were gone
    training   cells in training without a micro-step or an optimizer step: they wait for groups, or for the others of the step
    no work    of cells in rollout, the share of slots for which no execution was there: 1 - waterlevel / capacity
    harnesses  the rest: executions were there, but their harnesses worked and asked nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from qwengyre.core.records import Validity
from qwengyre.dashboard.executions import ExecutionTable, GroupEntry
from qwengyre.dashboard.series import RoleSpan, RunSeries
from qwengyre.telemetry.records import WaterlevelSampled

CHANGING: Final = frozenset({"draining", "to_training", "to_rollout"})
FATES: Final = (
    "trained",
    "evaluations",
    "groups without a spread",
    "executions that were not scored",
    "rewards at the mean of their group",
    "left out by a hook",
    "given no advantage by a hook",
    "side calls, and beyond trajectory.j_max",
    "not trained yet",
)
"""What became of sampled tokens, in the order in which they are told."""


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """All times in hours. A cell's hours times its devices are device hours."""

    device_h: dict[str, float]
    """By role: rollout, training, changing role, lost."""
    devices_per_cell: int
    tokens_generated: int
    tokens_by_fate: dict[str, int]
    """Of those of finished executions, by `FATES`; they add up to `tokens_generated`."""
    sandbox_h: float
    """From the start of an execution to its score, a wait for a place included, summed over executions."""
    idle_h: dict[str, float]
    """Device hours by cause."""

    @property
    def tokens_thrown_away(self) -> int:
        """Sampled for training, and not trained."""
        kept = ("trained", "evaluations", "not trained yet")
        return sum(count for fate, count in self.tokens_by_fate.items() if fate not in kept)


def run_costs(run: RunSeries, table: ExecutionTable, *, devices_per_cell: int = 1, keeps_zero: bool = False) -> RunCosts:
    """Of a run as far as it has come. `keeps_zero`: its `trajectory.keep_zero_advantage`."""
    role_s = _by_role(run.spans)
    device_h = {role: seconds * devices_per_cell / 3600 for role, seconds in role_s.items()}
    ended = [entry for entry in table.executions.values() if entry.ended_at is not None]
    fates = _fates(run, table, keeps_zero)
    return RunCosts(
        device_h=device_h,
        devices_per_cell=devices_per_cell,
        tokens_generated=sum(entry.num_tokens or 0 for entry in ended),
        tokens_by_fate={fate: fates[fate] for fate in FATES if fates[fate]},
        sandbox_h=sum(entry.seconds or 0.0 for entry in ended) / 3600,
        idle_h={cause: seconds * devices_per_cell / 3600 for cause, seconds in _idle_s(run, table.busy_s, role_s).items()},
    )


def _by_role(spans: Sequence[RoleSpan]) -> dict[str, float]:
    seconds = dict.fromkeys(("rollout", "training", "changing role", "lost"), 0.0)
    for span in spans:
        seconds["changing role" if span.role in CHANGING else span.role] += span.end - span.start
    return seconds


def _judged(group: GroupEntry, index: int, keeps_zero: bool) -> str | None:
    """Why hooks have an execution of a group not trained; None where they do, or none was asked."""
    if group.judgement is None:
        return None
    advantage = group.judgement.advantages[index]
    if advantage is None:
        return "left out by a hook"
    return None if advantage or keeps_zero else "given no advantage by a hook"


def _fates(run: RunSeries, table: ExecutionTable, keeps_zero: bool) -> Counter[str]:
    fates: Counter[str] = Counter()
    in_trained_groups = 0
    for group in table.groups.values():
        members = [entry for entry in table.members(group.group) if entry.ended_at is not None]
        rewards = [entry.counted_reward for entry in members if entry.counted_reward is not None]
        mean = sum(rewards) / max(1, len(rewards))
        for entry in members:
            tokens = entry.num_tokens or 0
            if group.kind != "train":
                fates["evaluations"] += tokens
            elif entry.validity != Validity.VALID.value:
                fates["executions that were not scored"] += tokens
            elif group.step is None:
                fates["not trained yet"] += tokens
            elif (fate := _judged(group, entry.index, keeps_zero)) is not None:
                fates[fate] += tokens
            elif group.judgement is None and not keeps_zero and min(rewards) == max(rewards):
                fates["groups without a spread"] += tokens
            elif group.judgement is None and not keeps_zero and entry.reward == mean:
                fates["rewards at the mean of their group"] += tokens
            else:
                in_trained_groups += tokens
    trained = min(in_trained_groups, sum(step.tokens_trained for step in run.steps))
    fates["trained"] = trained
    fates["side calls, and beyond trajectory.j_max"] = in_trained_groups - trained
    return fates


def _idle_s(run: RunSeries, busy_s: Mapping[str, float], role_s: Mapping[str, float]) -> dict[str, float]:
    total = sum(role_s.values()) * run.summary.idle_share
    waits = {
        "cells lost": role_s["lost"],
        "training: waiting for groups or for each other": max(0.0, role_s["training"] - busy_s.get("training", 0.0)),
        "rollout: no execution for a slot": _empty_slots_s(run),
    }
    idle: dict[str, float] = {}
    for cause, seconds in waits.items():
        idle[cause] = min(seconds, total)
        total -= idle[cause]
    idle["rollout: harnesses at work, no call to answer"] = total
    return idle


def _empty_slots_s(run: RunSeries) -> float:
    """Seconds of cells in rollout whose slots were empty, summed over cells."""
    cells = [(span.start, span.end) for span in run.spans if span.role == "rollout"]
    levels: list[WaterlevelSampled] = sorted(run.levels, key=lambda level: level.at)
    changes = sorted([(start, 1) for start, _ in cells] + [(end, -1) for _, end in cells])
    seconds, num_cells, at = 0.0, 0, 0.0
    share = 0.0
    events: list[tuple[float, int, WaterlevelSampled | int]] = [(level.at, 1, level) for level in levels]
    events += [(time, 0, step) for time, step in changes]
    for time, _, what in sorted(events, key=lambda event: event[:2]):
        seconds += (time - at) * num_cells * share
        at = time
        if isinstance(what, WaterlevelSampled):
            share = max(0.0, 1.0 - what.waterlevel / what.capacity) if what.capacity else 0.0
        else:
            num_cells += what
    return seconds
