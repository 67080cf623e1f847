"""One execution as people read it: its contexts as threads of calls, each with what is new in it and what was trained. Legend: `S` sampled tokens.

A **thread** is a line of calls in which each goes on from the one before. A retry, a changed history, a sub-agent and a context after a
compaction each begin a thread of their own, which names the call that it left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from qwengyre.core.arrays import FLAG, TOKEN, unpack
from qwengyre.core.ids import CallId
from qwengyre.core.records import Role, Trajectory
from qwengyre.dashboard.said import Decode, ReadAnswer, ShownAnswer, ShownMessage, messages_of
from qwengyre.dashboard.tree_rows import short
from qwengyre.trajectory.calls import RecordedCall
from qwengyre.trajectory.paths import is_target
from qwengyre.trajectory.records import BranchCause
from qwengyre.trajectory.tree import TrajectoryTree

PROMPT_TAIL: Final = 128
"""Last tokens of a prompt that tell how its answer begins."""
BACK_TOKENS: Final = 4096
"""How far back the beginning of the message is sought in which a thread leaves another."""

ROLE_NAMES: Final = {
    Role.MAIN: "main agent",
    Role.MAIN_SUMMARY: "main agent, summary",
    Role.SUB_AGENT: "sub-agent",
    Role.SUB_AGENT_SUMMARY: "sub-agent, summary",
    Role.SIDE: "side call",
}


class ShownCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call: what is new in its context, and its answer."""

    call: str
    """Without its execution: `c7`."""
    role: Role
    messages: tuple[ShownMessage, ...]
    answer: ShownAnswer
    num_shared: int
    """Tokens of its context that other calls brought."""
    num_context: int
    num_sampled: int
    num_trainable: int
    num_trained: int | None
    """None until the group has ended."""
    mean_logprob: float | None
    versions: tuple[int, ...]
    servers: tuple[str, ...]
    reason: str
    is_answered: bool
    detail: str
    seconds: float | None
    held_s: float
    num_moves: int

    @property
    def role_name(self) -> str:
        return ROLE_NAMES[self.role]


class ShownThread(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that go on from each other."""

    number: int
    title: str
    """Whose calls they are: `main agent`, `sub-agent` ..."""
    why: str
    """Why it begins where it does: `retry of`, `history changed after`, `continues from the summary of`, `beside`."""
    parent: str
    """The call that `why` means; "" for the first."""
    level: int
    """How many threads it left."""
    calls: tuple[str, ...]
    num_sampled: int


class Threads:
    """Which call stands in which thread, for the outline and for one page of calls."""

    def __init__(self, tree: TrajectoryTree, roles: Mapping[CallId, Role]):
        self.tree, self.roles = tree, roles
        self.lines: list[list[RecordedCall]] = []
        self.num_trainable = _num_trainable(tree, roles)
        """Sampled tokens of each call that anyone trains."""
        self._line_of: dict[CallId, int] = {}
        for call in tree.calls.values():
            line = self._line_to_join(call)
            if line is None:
                line = len(self.lines)
                self.lines.append([])
            self.lines[line].append(call)
            self._line_of[call.id] = line

    def is_first(self, call: RecordedCall) -> bool:
        """Whether a thread begins with this call."""
        return self.lines[self._line_of[call.id]][0] is call

    def _line_to_join(self, call: RecordedCall) -> int | None:
        """The line whose last call this one goes on from."""
        base = self._base(call)
        if base is None or call.started.cause not in (BranchCause.EXTENDS, BranchCause.RERENDERED):
            return None
        line = self._line_of[base.id]
        return line if self.lines[line][-1] is base and self.roles[base.id] is self.roles[call.id] else None

    def _base(self, call: RecordedCall) -> RecordedCall | None:
        base = call.base
        return self.tree.calls.get(base) if base is not None else None

    def shown(self) -> list[ShownThread]:
        """The threads in the order in which they began."""
        levels: list[int] = []
        shown = []
        for number, line in enumerate(self.lines):
            first = line[0]
            why, parent = self._origin(first)
            levels.append(levels[self._line_of[parent]] + 1 if parent is not None and self._line_of[parent] < number else 0)
            shown.append(
                ShownThread(
                    number=number,
                    title=ROLE_NAMES[self.roles[first.id]],
                    why=why,
                    parent=short(parent) if parent is not None else "",
                    level=levels[number],
                    calls=tuple(short(call.id) for call in line),
                    num_sampled=sum(call.num_sampled for call in line),
                )
            )
        return shown

    def _origin(self, first: RecordedCall) -> tuple[str, CallId | None]:
        started, base = first.started, self._base(first)
        if started.hints.quotes in self.tree.calls:
            return "continues from the summary", started.hints.quotes
        if base is not None and started.cause is BranchCause.RETRY:
            return "asks again", base.id
        if base is not None and started.cause in (BranchCause.EXTENDS, BranchCause.RERENDERED):
            is_other = self.roles[base.id] is not self.roles[first.id]
            return ("continues for another purpose from" if is_other else "another answer after"), base.id
        if self.roles[first.id] in (Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY) and (parent := self._caller(first)) is not None:
            return "started by", parent
        if base is not None:
            return "history changed after", base.id
        return ("beside", self._before(first)) if self._line_of[first.id] else ("", None)

    def _caller(self, first: RecordedCall) -> CallId | None:
        """The last call of another agent before a sub-agent's first one."""
        return next(
            (
                call.id
                for call in reversed(list(self.tree.calls.values()))
                if call.number < first.number and self.roles[call.id] in (Role.MAIN, Role.MAIN_SUMMARY)
            ),
            None,
        )

    def _before(self, first: RecordedCall) -> CallId | None:
        return next((call.id for call in reversed(list(self.tree.calls.values())) if call.number < first.number), None)


class TokenReader(msgspec.Struct, frozen=True):
    """How a run's tokens are read."""

    decode: Decode
    read_answer: ReadAnswer
    start_token: int | None
    """The token that begins a message; None where the tokenizer has none."""


def shown_call(
    threads: Threads, call: RecordedCall, trained: Mapping[CallId, np.ndarray] | None, reader: TokenReader
) -> ShownCall:
    """What is new in one call. `trained`: by call, bool (S,); None while that is not known."""
    prompt_T, num_new = _prompt(threads, call, reader)
    started, finished = call.started, call.finished
    sampled = call.sampled_S
    return ShownCall(
        call=short(call.id),
        role=threads.roles[call.id],
        messages=tuple(messages_of(reader.decode(prompt_T[len(prompt_T) - num_new :].tolist()))),
        answer=reader.read_answer(sampled.tolist(), prompt_T[-PROMPT_TAIL:].tolist()) if len(sampled) else ShownAnswer(""),
        num_shared=call.base_tokens,
        num_context=call.num_context,
        num_sampled=call.num_sampled,
        num_trainable=threads.num_trainable[call.id],
        num_trained=None if trained is None else int(trained[call.id].sum()) if call.id in trained else 0,
        mean_logprob=float(call.logprob_S.mean()) if call.num_sampled else None,
        versions=call.versions,
        servers=tuple(call.servers),
        reason=finished.reason if finished is not None else "running",
        is_answered=call.is_answered,
        detail=finished.detail if finished is not None else "",
        seconds=max(0.0, finished.at - started.at) if finished is not None else None,
        held_s=finished.held_s if finished is not None else 0.0,
        num_moves=finished.num_moves if finished is not None else 0,
    )


def _prompt(threads: Threads, call: RecordedCall, reader: TokenReader) -> tuple[np.ndarray, int]:
    """The last tokens of a call's prompt, and how many of them are shown: its own, from the beginning of a message on."""
    segments = threads.tree.path_of(call.id)
    sequence_T = threads.tree.token_ids_T(segments) if segments else np.empty(0, TOKEN)
    prompt_T = sequence_T[: len(sequence_T) - call.num_sampled]
    num_new = call.num_context
    is_first = threads.is_first(call)
    if is_first and reader.start_token is not None and num_new < len(prompt_T):
        first = max(0, len(prompt_T) - num_new - BACK_TOKENS)
        starts = np.flatnonzero(prompt_T[first : len(prompt_T) - num_new] == reader.start_token)
        if len(starts):
            num_new = len(prompt_T) - first - int(starts[-1])
    return prompt_T, num_new


def _num_trainable(tree: TrajectoryTree, roles: Mapping[CallId, Role]) -> Counter[CallId]:
    counts: Counter[CallId] = Counter()
    for node in tree.nodes:
        for span in node.spans:
            if span.is_sampled and is_target(span, roles):
                counts[span.call] += span.num_tokens
    return counts


def trained_tokens(tree: TrajectoryTree, trajectories: Iterable[Trajectory]) -> dict[CallId, np.ndarray]:
    """bool (S,) by call: which of its sampled tokens any of `trajectories` trains."""
    trained = {name: np.zeros(call.num_sampled, FLAG) for name, call in tree.calls.items()}
    for trajectory in trajectories:
        flags_T, position = unpack(trajectory.trainable_T, FLAG), 0
        for part in trajectory.segments:
            _mark(trained, tree, part.node, flags_T[position : position + part.num_tokens])
            position += part.num_tokens
    return trained


def _mark(trained: dict[CallId, np.ndarray], tree: TrajectoryTree, node: int, flags_T: np.ndarray) -> None:
    for span in tree.nodes[node].spans:
        if span.is_sampled and span.start < len(flags_T):
            flags = flags_T[span.start : span.stop]
            trained[span.call][span.first_sampled : span.first_sampled + len(flags)] |= flags


def find_call(tree: TrajectoryTree, name: str) -> RecordedCall | None:
    """By its name without the execution."""
    return next((call for call in tree.calls.values() if short(call.id) == name), None)
