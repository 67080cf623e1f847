"""Call `hooks.group_filter`, `hooks.advantage` and `hooks.choice` on an ended group: a judgement, which is data from then on.

The judgement is journalled before anything of the group is trained, so that a restart takes it from there and asks no hook again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qwengyre.core.ids import GroupId
from qwengyre.core.records import Validity
from qwengyre.hooks.load import Hook
from qwengyre.hooks.rewards import number_of
from qwengyre.hooks.views import EndedExecution, EndedGroup, PathsToChoose
from qwengyre.trajectory.advantages import counts, group_advantages
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.harness_rules import HarnessRules
from qwengyre.trajectory.paths import candidate_paths, num_targets
from qwengyre.trajectory.process import FinishedExecution, Judgement, execution_rng
from qwengyre.trajectory.roles import assign_roles


class GroupToJudge(msgspec.Struct, frozen=True):
    group: GroupId
    task: str
    version: int
    finished: tuple[FinishedExecution, ...]


class Judge:
    """The hooks that a run has for its groups."""

    def __init__(
        self,
        group_filter: Hook | None,
        advantage: Hook | None,
        choice: Hook | None,
        config: TrajectoryConfig,
        *,
        seed: int,
        rules: Sequence[HarnessRules],
    ) -> None:
        self._filter, self._advantage, self._choice = group_filter, advantage, choice
        self._config, self._seed, self._rules = config, seed, rules

    @property
    def key(self) -> str:
        """Of the hooks that it has, for whoever waits too long for one."""
        present = [hook.ref.key for hook in (self._filter, self._advantage, self._choice) if hook is not None]
        return " or ".join(present)

    def judge(self, given: GroupToJudge) -> Judgement:
        """Raises HookFailed for what a hook raises, and for what it may not return."""
        outcomes = [one.outcome for one in given.finished]
        ended = EndedGroup(given.group, given.task, given.version, _ended(given.finished))
        if ended.executions and self._filter is not None:
            kept = self._filter(ended)
            if not isinstance(kept, bool) and type(kept).__name__ != "bool_":
                raise self._filter.refused(f"returned {kept!r} for group {given.group}: it must return True or False")
            if not kept:
                return Judgement((None,) * len(outcomes), (None,) * len(outcomes))
        advantages = group_advantages(outcomes, divide_by_std=bool(self._config.divide_by_std))
        if ended.executions and self._advantage is not None:
            made = iter(_advantages(self._advantage, ended))
            advantages = [next(made) if counts(outcome) else None for outcome in outcomes]
        return Judgement(tuple(advantages), tuple(map(self._choose, given.finished, advantages)))

    def _choose(self, one: FinishedExecution, advantage: float | None) -> tuple[int, ...] | None:
        is_trained = one.outcome.validity is Validity.VALID and (advantage or self._config.keep_zero_advantage)
        if self._choice is None or advantage is None or not is_trained:
            return None
        roles = assign_roles(one.tree.calls, self._rules)
        candidates = tuple(candidate_paths(one.tree, roles))
        if not candidates:
            return None
        targets = num_targets(one.tree, roles)
        paths = PathsToChoose(
            execution=one.execution,
            reward=one.outcome.score,
            advantage=advantage,
            candidates=candidates,
            num_trainable=tuple(sum(targets[part.node] for part in path.segments) for path in candidates),
            j_max=self._config.max_trajectories,
            rng=execution_rng(self._seed, one.execution),
            tree=one.tree,
        )
        return _places(self._choice, self._choice(paths), paths)


def _ended(finished: Sequence[FinishedExecution]) -> tuple[EndedExecution, ...]:
    return tuple(
        EndedExecution(
            execution=one.execution,
            reward=one.outcome.score,
            task_score=one.outcome.score if one.outcome.task_score is None else one.outcome.task_score,
            end=one.outcome.end,
            is_scored=one.outcome.validity is Validity.VALID,
            num_calls=len(one.tree.calls),
            num_tokens_sampled=sum(call.num_sampled for call in one.tree.calls.values()),
        )
        for one in finished
        if counts(one.outcome)
    )


def _advantages(hook: Hook, group: EndedGroup) -> list[float | None]:
    made, wanted = hook(group), len(group.executions)
    try:
        values = list(made)
    except TypeError:
        raise hook.refused(
            f"returned {type(made).__name__} for group {group.group}: it must return {wanted} advantages"
        ) from None
    if len(values) != wanted:
        raise hook.refused(f"returned {len(values)} advantages for the {wanted} executions of group {group.group}")
    return [
        None if value is None else number_of(hook, value, f"for {one.execution}")
        for value, one in zip(values, group.executions, strict=True)
    ]


def _places(hook: Hook, made: object, paths: PathsToChoose) -> tuple[int, ...]:
    """Raises HookFailed for what is not a choice of candidates."""

    def refuse(why: str) -> Exception:
        return hook.refused(f"returned {made!r} for {paths.execution}: {why}")

    num = len(paths.candidates)
    try:
        values = list(made)  # type: ignore[call-overload]
    except TypeError:
        raise refuse(f"it must return places in its {num} candidates") from None
    chosen: list[int] = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise refuse(f"{value!r} is no place in its candidates")
        place = value.__index__()
        if not 0 <= place < num:
            raise refuse(f"its candidates are numbered from 0 to {num - 1}")
        if place in chosen:
            raise refuse(f"candidate {place} is there twice")
        chosen.append(place)
    if paths.j_max is not None and len(chosen) > paths.j_max:
        raise refuse(f"at most {paths.j_max} may be chosen (trajectory.j_max)")
    return tuple(chosen)
