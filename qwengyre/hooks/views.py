"""What hooks are called with, and what they have to be: the types of docs/hooks.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from qwengyre.core.ids import CallId, ExecutionId, GroupId
from qwengyre.core.records import End, Role
from qwengyre.hooks.workspace import LeftWorkspace
from qwengyre.trajectory.calls import RecordedCall
from qwengyre.trajectory.paths import CandidatePath
from qwengyre.trajectory.tree import TrajectoryTree

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, control tokens included."""


@dataclass(frozen=True, slots=True)
class TranscriptCall:
    """One model call of an execution."""

    id: CallId
    role: Role
    prompt_ids: tuple[int, ...]
    """The whole context, as the model read it."""
    answer_ids: tuple[int, ...]
    """What the model wrote."""
    decode: Decode

    @property
    def prompt(self) -> str:
        """The context as text, control tokens included."""
        return self.decode(self.prompt_ids)

    @property
    def answer(self) -> str:
        """The answer as text, control tokens included."""
        return self.decode(self.answer_ids)


class Transcript:
    """What an execution said, call by call, in the order in which the calls came."""

    def __init__(self, tree: TrajectoryTree, roles: dict[CallId, Role], decode: Decode) -> None:
        self.tree = tree
        """Calls as a tree of tokens."""
        self._roles, self._decode = roles, decode

    def __len__(self) -> int:
        return len(self.tree.calls)

    @property
    def calls(self) -> tuple[TranscriptCall, ...]:
        """All calls; each is as long as its context, so look at those that matter."""
        return tuple(self._said(call) for call in self.tree.calls.values())

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens that the model wrote, over all calls."""
        return sum(call.num_sampled for call in self.tree.calls.values())

    def _said(self, call: RecordedCall) -> TranscriptCall:
        ids = self.tree.token_ids_T(self.tree.path_of(call.id)).tolist()
        split = len(ids) - call.num_answer
        return TranscriptCall(call.id, self._roles[call.id], tuple(ids[:split]), tuple(ids[split:]), self._decode)


@dataclass(frozen=True, slots=True)
class ScoredExecution:
    """An execution whose workspace its task has scored: what `hooks.reward` is called with."""

    execution: ExecutionId
    attempt: int
    task: str
    """Name of the task."""
    task_folder: str
    instruction: str
    kind: Literal["train", "evaluation"]
    score: float
    """What the task's own tests said."""
    reward_range: tuple[float, float]
    """In which the score lies."""
    end: End
    """How the harness ended."""
    duration_s: float
    """From the start of the execution to its score."""
    workspace: LeftWorkspace
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class EndedExecution:
    """A member of a rollout group that counts: scored, or with nothing to score."""

    execution: ExecutionId
    reward: float
    task_score: float
    """What the task's tests said: the reward, unless `hooks.reward` made another of it."""
    end: End
    is_scored: bool
    """False where there was nothing to score: its reward is 0, and it trains nothing."""
    num_calls: int
    num_tokens_sampled: int


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A rollout group whose executions have all ended: what `hooks.group_filter` and `hooks.advantage` are called with."""

    group: GroupId
    task: str
    version: int
    """Policy version at its dispatch."""
    executions: tuple[EndedExecution, ...]
    """Those that count, in their order; dropped ones are left out."""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(one.reward for one in self.executions)


@dataclass(frozen=True, slots=True)
class PathsToChoose:
    """The paths of an execution that may become trajectories: what `hooks.choice` is called with."""

    execution: ExecutionId
    reward: float
    advantage: float
    candidates: tuple[CandidatePath, ...]
    """Each from the root to a last trainable token. Trainable tokens that an earlier choice has are not trained again."""
    num_trainable: tuple[int, ...]
    """Trainable tokens of each candidate, those that it shares included."""
    j_max: int | None
    """Most that may be chosen; None for no cap."""
    rng: np.random.Generator
    """Seeded by the run and the execution: all the randomness that a choice may have."""
    tree: TrajectoryTree


class Reward(Protocol):
    """`hooks.reward`."""

    def __call__(self, execution: ScoredExecution, /) -> float:
        """The reward: any finite number."""
        ...


class GroupFilter(Protocol):
    """`hooks.group_filter`."""

    def __call__(self, group: EndedGroup, /) -> bool:
        """False: nothing of the group is trained, and none of its executions counts in the step's mean."""
        ...


class Advantage(Protocol):
    """`hooks.advantage`."""

    def __call__(self, group: EndedGroup, /) -> Sequence[float | None]:
        """One for each of `group.executions`; None leaves an execution out, as if it had been dropped."""
        ...


class PathChoice(Protocol):
    """`hooks.choice`."""

    def __call__(self, paths: PathsToChoose, /) -> Sequence[int]:
        """Places in `candidates`, each at most once, in the order in which they are trained; at most `j_max`."""
        ...
