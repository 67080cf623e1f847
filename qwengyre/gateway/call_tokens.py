"""The tokens of one execution's calls, as rows. A row is `row(base)[:base_tokens] + context + sampled`: only the last two
are stored, so memory grows with distinct tokens. Legend: `T` tokens of a row, `S` sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import msgspec
import numpy as np

from qwengyre.core.arrays import TOKEN
from qwengyre.core.ids import CallId, ExecutionId, ServerId
from qwengyre.gateway.records import Asked, Ended, Sampled
from qwengyre.trajectory.records import BranchCause, CallEvent, CallFinished, CallStarted, TokensSampled

TOKEN_BYTES = TOKEN.itemsize
REMEMBER_FROM = 16
"""A row that takes more steps than this to put together is kept for a while."""
RECENT_ROWS = 4


class SampledSpan(msgspec.Struct):
    """Sampled tokens of one version by one server, from index `start` on."""

    start: int
    version: int
    server: ServerId


class CallTokens:
    """One call's record."""

    __slots__ = ("asked", "ended", "id", "logprobs", "sampled", "spans")

    def __init__(self, call_id: CallId, asked: Asked):
        self.id, self.asked = call_id, asked
        self.sampled = bytearray()
        self.logprobs = bytearray()
        self.spans: list[SampledSpan] = []
        self.ended: Ended | None = None

    def add(self, record: Sampled) -> None:
        last = self.spans[-1] if self.spans else None
        if last is None or last.version != record.version or last.server != record.server:
            self.spans.append(SampledSpan(start=self.num_sampled, version=record.version, server=record.server))
        self.sampled += record.token_ids
        self.logprobs += record.logprobs

    @property
    def num_sampled(self) -> int:
        return len(self.sampled) // TOKEN_BYTES

    @property
    def num_prompt(self) -> int:
        return self.asked.base_tokens + len(self.asked.context_ids) // TOKEN_BYTES

    @property
    def num_row(self) -> int:
        return self.num_prompt + self.num_sampled

    @property
    def is_abandoned(self) -> bool:
        return self.ended is not None and self.ended.abandoned


class CallRows:
    """All calls of one session, by number."""

    def __init__(self, execution: ExecutionId, attempt: int, *, temperature: float, trainable: bool):
        self._prefix = f"{execution}/c" if attempt == 0 else f"{execution}/a{attempt}c"
        self._execution, self._temperature, self._trainable = execution, temperature, trainable
        self._calls: list[CallTokens] = []
        self._recent: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, number: int) -> CallTokens:
        return self._calls[number]

    def __iter__(self) -> Iterator[CallTokens]:
        return iter(self._calls)

    def number(self, call: CallId) -> int:
        return int(call[len(self._prefix) :])

    def add(self, asked: Asked) -> CallTokens:
        tokens = CallTokens(CallId(f"{self._prefix}{asked.call}"), asked)
        self._calls.append(tokens)
        return tokens

    def row(self, number: int, num_tokens: int | None = None) -> np.ndarray:
        """int32 (T,): the first `num_tokens` (all, without it) tokens of a call's row. Walks the bases, no recursion."""
        call = self._calls[number]
        left = call.num_row if num_tokens is None else num_tokens
        parts: list[bytes | memoryview] = []
        num_walked = 0
        while left > 0:
            known = self._recent.get(call.asked.call)
            if known is not None and len(known) >= left:
                parts.append(memoryview(known[:left]).cast("B"))
                break
            own = left - call.asked.base_tokens
            if own > 0:
                parts += _own(call, own)
                left -= own
            if call.asked.base < 0:
                break
            call, num_walked = self._calls[call.asked.base], num_walked + 1
        row_T = np.frombuffer(b"".join(reversed(parts)), dtype=TOKEN)
        if num_walked > REMEMBER_FROM:
            self._remember(number, row_T)
        return row_T

    def _remember(self, number: int, row_T: np.ndarray) -> None:
        """Rows only grow, so a part of one stays true."""
        self._recent[number] = row_T
        while len(self._recent) > RECENT_ROWS:
            del self._recent[next(iter(self._recent))]

    def num_distinct(self) -> int:
        """Tokens stored."""
        return sum(len(call.asked.context_ids) // TOKEN_BYTES + call.num_sampled for call in self._calls)

    def answer_ids(self, number: int) -> list[int]:
        """Tokens of the whole answer, those sampled by the abandoned calls that it goes on with included."""
        call = self._calls[number]
        total = call.asked.first_index + call.num_sampled
        return self.row(number)[call.num_row - total :].tolist() if total else []

    def events(self) -> list[CallEvent]:
        """The records of `trajectory.records`, call by call. A call without an end counts as abandoned."""
        events: list[CallEvent] = []
        masked = self._num_masked()
        for call in self._calls:
            events.append(self._started(call))
            ends = [*(span.start for span in call.spans), call.num_sampled][1:]
            for span, end in zip(call.spans, ends, strict=True):
                part = slice(span.start * TOKEN_BYTES, end * TOKEN_BYTES)
                events.append(
                    TokensSampled(
                        call=call.id,
                        token_ids=bytes(call.sampled[part]),
                        logprobs=bytes(call.logprobs[part]),
                        version=span.version,
                        server=span.server,
                    )
                )
            events.append(self._finished(call, masked[call.asked.call]))
        return events

    def _num_masked(self) -> list[int]:
        """Own sampled tokens of every call after a stop string: what one that goes on with an abandoned call cannot hold is that
        call's."""
        masked = [call.ended.num_masked if call.ended is not None else 0 for call in self._calls]
        for call in reversed(self._calls):
            number, asked = call.asked.call, call.asked
            over = max(0, masked[number] - call.num_sampled)
            masked[number] -= over
            if over and asked.first_index:
                masked[asked.base] = max(masked[asked.base], over)
        return masked

    def _started(self, call: CallTokens) -> CallStarted:
        asked = call.asked
        return CallStarted(
            execution=self._execution,
            call=call.id,
            base=self._calls[asked.base].id if asked.base >= 0 else None,
            base_tokens=asked.base_tokens,
            context_ids=asked.context_ids,
            cause=BranchCause(asked.cause),
            hints=asked.hints,
            temperature=self._temperature,
            trainable=self._trainable and self._temperature > 0,
            at=asked.at,
        )

    def _finished(self, call: CallTokens, num_masked: int) -> CallFinished:
        ended = call.ended
        if ended is None:
            return CallFinished(
                call=call.id, reason="abort", num_sampled=call.num_sampled, cached_tokens=0, abandoned=True, at=call.asked.at
            )
        return CallFinished(
            call=call.id,
            reason=cast(Literal["stop", "length", "abort", "error"], ended.reason),
            num_sampled=ended.num_sampled,
            cached_tokens=ended.cached_tokens,
            abandoned=ended.abandoned,
            at=ended.at,
            num_moves=ended.num_moves,
            held_s=ended.held_s,
            detail=ended.detail,
            num_masked=num_masked,
        )


def _own(call: CallTokens, num_tokens: int) -> list[bytes | memoryview]:
    """The first `num_tokens` of what a call stores itself, last part first."""
    num_bytes, context = num_tokens * TOKEN_BYTES, call.asked.context_ids
    if num_bytes <= len(context):
        return [memoryview(context)[:num_bytes]]
    return [bytes(call.sampled[: num_bytes - len(context)]), context]
