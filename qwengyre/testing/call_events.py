"""Recorded calls without a gateway: for tests of everything that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwengyre.core.arrays import LOGPROB, TOKEN, pack
from qwengyre.core.ids import CallId, ExecutionId, ServerId
from qwengyre.trajectory.records import BranchCause, CallEvent, CallFinished, CallStarted, RoleHints, TokensSampled

PLAIN = RoleHints("chat", system_digest="main", num_tools=1)


def call_events(
    call: str,
    context: Sequence[int],
    sampled: Sequence[int],
    *,
    base: str | None = None,
    base_tokens: int = 0,
    at: float = 0.0,
    version: int = 0,
    hints: RoleHints = PLAIN,
    temperature: float = 1.0,
    trainable: bool = True,
    abandoned: bool = False,
    reason: str = "stop",
    cause: BranchCause | None = None,
    chunk: int = 0,
    num_masked: int = 0,
) -> list[CallEvent]:
    """The events of one call of execution `e000000-0`, in order. `chunk` tokens an event, 0 for all in one.

    The log-prob of the i-th sampled token is -(i + 1) / 16, exact in float32.
    """
    execution = ExecutionId(call.rpartition("/")[0] or "e000000-0")
    default = BranchCause.EXTENDS if base else BranchCause.ROOT
    start = CallStarted(
        execution=execution,
        call=CallId(call),
        base=CallId(base) if base else None,
        base_tokens=base_tokens,
        context_ids=pack(context, TOKEN),
        cause=cause or default,
        hints=hints,
        temperature=temperature,
        trainable=trainable,
        at=at,
    )
    logprobs = -(np.arange(len(sampled)) + 1) / 16
    step = chunk or max(1, len(sampled))
    tokens = [
        TokensSampled(
            call=CallId(call),
            token_ids=pack(sampled[first : first + step], TOKEN),
            logprobs=pack(logprobs[first : first + step], LOGPROB),
            version=version,
            server=ServerId("cell-0"),
        )
        for first in range(0, len(sampled), step)
    ]
    finish = CallFinished(
        call=CallId(call),
        reason=reason,
        num_sampled=len(sampled),
        cached_tokens=0,
        abandoned=abandoned,
        at=at + 0.5,
        num_masked=num_masked,
    )
    return [start, *tokens, finish]
