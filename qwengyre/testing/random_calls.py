"""Random executions for property tests: calls as a gateway would record them of a harness that does anything."""

from __future__ import annotations

import msgspec
import numpy as np

from qwengyre.core.ids import ExecutionId, call_id
from qwengyre.testing.call_records import call_records
from qwengyre.trajectory.records import BranchCause, CallRecord, RoleHints

AGENTS = (RoleHints("chat", system_digest="main", num_tools=3), RoleHints("chat", system_digest="sub", num_tools=2))
TITLE = RoleHints("chat", system_digest="title", num_tools=0)


class RandomCall(msgspec.Struct, frozen=True):
    """One call of a random execution, with its whole sequence in plain lists: what a tree must agree with."""

    call: str
    prompt: list[int]
    sampled: list[int]
    was_answered: bool
    """The client has it: nobody hung up."""
    num_masked: int
    records: list[CallRecord]

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.sampled


def random_execution(
    rng: np.random.Generator, num_calls: int, *, num_words: int = 3, execution: str = "e000000-0"
) -> list[RandomCall]:
    """Calls that extend, change, retry or repeat earlier ones, or begin afresh.

    Few different words make accidental equality common, which is where trees go wrong. Some contexts come without a base although they
    repeat an earlier sequence, as when a gateway has lost its sessions.
    """
    calls: list[RandomCall] = []
    for index in range(num_calls):
        base = calls[int(rng.integers(len(calls)))] if calls and rng.random() < 0.85 else None
        kind = rng.choice(["extends", "diverges", "retry"], p=[0.6, 0.25, 0.15]) if base else "root"
        shared = _num_shared(kind, base, rng)
        words = rng.integers(num_words, size=0 if kind == "retry" else rng.integers(1, 5)).tolist()
        sampled = rng.integers(num_words, size=rng.integers(0, 5)).tolist()
        prompt = (base.sequence[:shared] if base else []) + words
        named = base if base is not None and rng.random() < 0.8 else None
        answered = bool(rng.random() < 0.85)
        num_masked = int(rng.integers(len(sampled) + 1)) if rng.random() < 0.2 else 0
        hints = AGENTS[int(rng.random() < 0.3)] if index == 0 or rng.random() < 0.9 else TITLE
        records = call_records(
            index,
            words if named else prompt,
            sampled,
            base=calls.index(named) if named else -1,
            base_tokens=shared if named else 0,
            version=int(rng.integers(3)),
            hints=hints,
            abandoned=not answered,
            cause=BranchCause(kind),
            chunk=int(rng.integers(3)),
            num_masked=num_masked,
        )
        calls.append(RandomCall(call_id(ExecutionId(execution), 0, index), prompt, sampled, answered, num_masked, records))
    return calls


def interleave(calls: list[RandomCall], rng: np.random.Generator) -> list[CallRecord]:
    """All records in a random order that keeps each call's own."""
    left = [list(call.records) for call in calls]
    turns = rng.permutation(np.repeat(np.arange(len(calls)), [len(records) for records in left]))
    return [left[turn].pop(0) for turn in turns]


def _num_shared(kind: str, base: RandomCall | None, rng: np.random.Generator) -> int:
    if base is None:
        return 0
    if kind == "retry":
        return len(base.prompt)
    seen = len(base.sequence) - base.num_masked
    return seen if kind == "extends" else int(rng.integers(seen + 1))
