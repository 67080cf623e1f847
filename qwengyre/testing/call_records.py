"""Recorded calls without a gateway: for tests of everything that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from qwengyre.core.arrays import LOGPROB, TOKEN, pack
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.trajectory.records import (
    BranchCause,
    CallEnd,
    CallFinished,
    CallRecord,
    CallStarted,
    Opened,
    RoleHints,
    TokensSampled,
)
from qwengyre.trajectory.tree import TrajectoryTree

PLAIN = RoleHints("chat", system_digest="main", num_tools=1)


def opened(execution: str = "e", *, attempt: int = 0, temperature: float = 1.0, trainable: bool = True) -> Opened:
    return Opened(0, ExecutionId(execution), attempt, 0, temperature, trainable, 1 << 20, 1 << 20, "policy")


def tree_of(
    *calls: Iterable[CallRecord], execution: str = "e", temperature: float = 1.0, trainable: bool = True
) -> TrajectoryTree:
    """The tree of some calls' records."""
    records = (record for call in calls for record in call)
    return TrajectoryTree.build(opened(execution, temperature=temperature, trainable=trainable), records)


def call_records(
    call: int,
    context: Sequence[int] | np.ndarray,
    sampled: Sequence[int] | np.ndarray,
    *,
    base: int = -1,
    base_tokens: int = 0,
    at: float | None = None,
    version: int = 0,
    hints: RoleHints = PLAIN,
    abandoned: bool = False,
    reason: CallEnd = "stop",
    cause: BranchCause | None = None,
    chunk: int = 0,
    num_masked: int = 0,
    first_index: int = 0,
) -> list[CallRecord]:
    """The records of one call, in order. `chunk` tokens a record, 0 for all in one; `at` its number by default.

    The log-prob of the i-th sampled token is -(i + 1) / 16, exact in float32.
    """
    at = float(call) if at is None else at
    started = CallStarted(
        session=0,
        call=call,
        base=base,
        base_tokens=base_tokens,
        context_ids=pack(context, TOKEN),
        cause=cause or (BranchCause.EXTENDS if base >= 0 else BranchCause.ROOT),
        hints=hints,
        at=at,
        key=b"",
        ordinal=0,
        first_index=first_index,
        dialect="chat",
    )
    logprobs = -(np.arange(len(sampled)) + 1) / 16
    step = chunk or max(1, len(sampled))
    tokens = [
        TokensSampled(
            session=0,
            call=call,
            token_ids=pack(sampled[first : first + step], TOKEN),
            logprobs=pack(logprobs[first : first + step], LOGPROB),
            version=version,
            server=ServerId("cell-0"),
        )
        for first in range(0, len(sampled), step)
    ]
    finished = CallFinished(
        session=0,
        call=call,
        reason=reason,
        num_sampled=len(sampled),
        cached_tokens=0,
        abandoned=abandoned,
        at=at + 0.5,
        num_masked=num_masked,
    )
    return [started, *tokens, finished]
