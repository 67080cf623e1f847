"""The recorded calls of one attempt of an execution: what the gateway holds while they run, and what the tree is built from.

A call's *sequence* is the tokens that the engine saw and made for it: `sequence(base)[:base_tokens] + context + sampled`. Only the last
two are stored (the call's *own* tokens), so memory grows with new tokens, never with calls times context. Legend: `T` tokens of a
sequence, `S` sampled tokens of one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from qwengyre.core.arrays import LOGPROB, TOKEN, VERSION, unpack
from qwengyre.core.errors import CallOutOfOrder, TokenCountMismatch
from qwengyre.core.ids import CallId, ServerId, call_id, call_number
from qwengyre.trajectory.records import CallFinished, CallRecord, CallStarted, Opened, TokensRouted, TokensSampled

TOKEN_BYTES = TOKEN.itemsize
REMEMBER_FROM = 16
"""A sequence that takes more steps than this to put together is kept for a while."""
RECENT_SEQUENCES = 4
"""As many as an agent usually has open contexts, its sub-agents included; each costs as much as a whole context."""


class SampledRun(NamedTuple):
    """Sampled tokens of one version by one server, from index `start` on."""

    start: int
    version: int
    server: ServerId


class RoutedRun(NamedTuple):
    """Experts of tokens of the sequence, from `start` on."""

    start: int
    num_tokens: int
    routes: bytearray
    """uint8 (num_tokens, B)"""


class RecordedCall:
    """One call while and after it is recorded. Its records are in order."""

    __slots__ = ("_logprobs", "_sampled", "base", "finished", "id", "num_masked", "routed", "runs", "started")

    def __init__(self, call: CallId, base: CallId | None, started: CallStarted):
        self.id, self.base, self.started = call, base, started
        self.finished: CallFinished | None = None
        self._sampled, self._logprobs = bytearray(), bytearray()
        self.runs: list[SampledRun] = []
        self.routed: list[RoutedRun] = []
        self.num_masked = 0
        """Last sampled tokens that came with or after a stop string."""

    def add(self, record: TokensSampled) -> None:
        if self.finished is not None:
            raise CallOutOfOrder(self.id, "sampled tokens after it finished")
        num_tokens, num_logprobs = len(record.token_ids) // TOKEN_BYTES, len(record.logprobs) // LOGPROB.itemsize
        if num_tokens != num_logprobs:
            raise TokenCountMismatch(self.id, num_tokens=num_tokens, num_logprobs=num_logprobs)
        last = self.runs[-1] if self.runs else None
        if last is None or last.version != record.version or last.server != record.server:
            self.runs.append(SampledRun(self.num_sampled, record.version, record.server))
        self._sampled += record.token_ids
        self._logprobs += record.logprobs

    def route(self, record: TokensRouted) -> None:
        if record.num_tokens < 1 or len(record.routes) % record.num_tokens:
            raise CallOutOfOrder(self.id, f"{len(record.routes)} bytes of routes for {record.num_tokens} tokens")
        last = self.routed[-1] if self.routed else None
        if last is not None and last.start + last.num_tokens == record.first:
            last.routes.extend(record.routes)
            self.routed[-1] = last._replace(num_tokens=last.num_tokens + record.num_tokens)
        else:
            self.routed.append(RoutedRun(record.first, record.num_tokens, bytearray(record.routes)))

    def finish(self, record: CallFinished) -> None:
        if self.finished is not None:
            raise CallOutOfOrder(self.id, "finished twice")
        if record.num_sampled != self.num_sampled:
            raise CallOutOfOrder(self.id, f"finished with {record.num_sampled} tokens, but {self.num_sampled} were recorded")
        if not 0 <= record.num_masked <= self.num_answer:
            raise CallOutOfOrder(self.id, f"{record.num_masked} tokens after its stop string, but it has {self.num_answer}")
        self.finished = record

    @property
    def number(self) -> int:
        """Its place among the calls of the attempt, in the order in which they reached the gateway."""
        return self.started.call

    @property
    def base_tokens(self) -> int:
        return self.started.base_tokens

    @property
    def num_context(self) -> int:
        return len(self.started.context_ids) // TOKEN_BYTES

    @property
    def num_prompt(self) -> int:
        return self.base_tokens + self.num_context

    @property
    def num_sampled(self) -> int:
        return len(self._sampled) // TOKEN_BYTES

    @property
    def num_answer(self) -> int:
        """Tokens of the whole answer, those sampled by the abandoned calls that it continues included."""
        return self.started.first_index + self.num_sampled

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence."""
        return self.num_prompt + self.num_sampled

    @property
    def is_abandoned(self) -> bool:
        return self.finished is not None and self.finished.abandoned

    @property
    def is_answered(self) -> bool:
        """The client got the whole answer: only then is it trained for its own sake."""
        return self.finished is not None and not self.finished.abandoned and self.finished.reason != "error"

    def _view(self, data: bytearray, dtype: np.dtype) -> np.ndarray:
        """A view of a finished call; a copy of a running one, since a view would forbid to append."""
        return unpack(data if self.finished is not None else bytes(data), dtype)

    @property
    def sampled_S(self) -> np.ndarray:
        return self._view(self._sampled, TOKEN)

    @property
    def logprob_S(self) -> np.ndarray:
        return self._view(self._logprobs, LOGPROB)

    @property
    def version_S(self) -> np.ndarray:
        version_S = np.empty(self.num_sampled, VERSION)
        for run in self.runs:
            version_S[run.start :] = run.version
        return version_S

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions in the order in which they sampled."""
        return tuple(dict.fromkeys(run.version for run in self.runs))

    @property
    def servers(self) -> list[ServerId]:
        """The servers that made tokens, in order: more than one when the call moved."""
        return list(dict.fromkeys(run.server for run in self.runs))

    @property
    def own_ids(self) -> np.ndarray:
        """int32: the tokens this call stores itself, its context and then what it sampled."""
        return np.concatenate([unpack(self.started.context_ids, TOKEN), self.sampled_S])

    def own_parts(self, num_tokens: int) -> list[bytes | memoryview]:
        """The first `num_tokens` of its own tokens as bytes, the last part first."""
        num_bytes, context = num_tokens * TOKEN_BYTES, self.started.context_ids
        if num_bytes <= len(context):
            return [memoryview(context)[:num_bytes]]
        return [bytes(self._sampled[: num_bytes - len(context)]), context]

    def records(self) -> Iterator[CallRecord]:
        """The fewest records that make an equal call: tokens of one version and server are one record, whatever chunks they came in."""
        yield self.started
        ends = [*(run.start for run in self.runs), self.num_sampled][1:]
        for run, end in zip(self.runs, ends, strict=True):
            token_ids = bytes(self._sampled[run.start * TOKEN_BYTES : end * TOKEN_BYTES])
            logprobs = bytes(self._logprobs[run.start * LOGPROB.itemsize : end * LOGPROB.itemsize])
            yield TokensSampled(self.started.session, self.number, token_ids, logprobs, run.version, run.server)
        for routed in self.routed:
            yield TokensRouted(self.started.session, self.number, routed.start, routed.num_tokens, bytes(routed.routes))
        if self.finished is not None:
            yield self.finished


class CallLog:
    """Every call of one attempt, by number. Any interleaving of the same calls gives the same log."""

    def __init__(self, opened: Opened):
        self.opened = opened
        self.is_closed = False
        """No more records come."""
        self._calls: dict[int, RecordedCall] = {}
        self._recent: dict[int, bytes] = {}

    @classmethod
    def of(cls, opened: Opened, records: Iterable[CallRecord]) -> CallLog:
        """Raises RecordError for records that contradict themselves."""
        log = cls(opened)
        for record in records:
            log.apply(record)
        return log

    def apply(self, record: CallRecord) -> RecordedCall:
        """Take one record. Raises CallOutOfOrder or TokenCountMismatch for a record that contradicts those before."""
        if isinstance(record, CallStarted):
            return self._start(record)
        call = self._calls.get(record.call)
        if call is None:
            raise CallOutOfOrder(self.id_of(record.call), "was recorded before its start")
        if isinstance(record, TokensSampled):
            call.add(record)
        elif isinstance(record, TokensRouted):
            call.route(record)
        else:
            call.finish(record)
            self._mask(call, record.num_masked)
        return call

    def _start(self, started: CallStarted) -> RecordedCall:
        call, base = self.id_of(started.call), self.id_of(started.base) if started.base >= 0 else None
        if started.call in self._calls:
            raise CallOutOfOrder(call, "started twice")
        if started.base_tokens < 0 or (base is None and started.base_tokens):
            raise CallOutOfOrder(call, f"shares {started.base_tokens} tokens with base {base}")
        if started.first_index:
            cut = self._calls.get(started.base)
            if cut is None or not cut.is_abandoned or cut.num_answer != started.first_index:
                raise CallOutOfOrder(call, f"continues {started.first_index} tokens of {base}, which did not end with them")
        recorded = self._calls[started.call] = RecordedCall(call, base, started)
        return recorded

    def _mask(self, call: RecordedCall, num_tokens: int) -> None:
        """Mask the last tokens of an answer: what the call itself did not sample is of the call that it continues."""
        while num_tokens:
            own = min(num_tokens, call.num_sampled)
            call.num_masked = max(call.num_masked, own)
            num_tokens -= own
            if num_tokens:
                call = self._calls[call.started.base]

    @property
    def is_trainable(self) -> bool:
        """False when the run said so, and at temperature 0."""
        return self.opened.trainable and self.opened.temperature > 0

    def id_of(self, number: int) -> CallId:
        known = self._calls.get(number)
        return known.id if known is not None else call_id(self.opened.execution, self.opened.attempt, number)

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, call: int | CallId) -> RecordedCall:
        return self._calls[call if isinstance(call, int) else call_number(call)]

    def __iter__(self) -> Iterator[RecordedCall]:
        """In the order in which the calls reached the gateway."""
        return (self._calls[number] for number in sorted(self._calls))

    def sequence(self, number: int, num_tokens: int | None = None) -> np.ndarray:
        """int32 (T,): the first `num_tokens` (all, without it) tokens of a call's sequence. Walks the bases, no recursion."""
        call = self._calls[number]
        left = call.num_tokens if num_tokens is None else num_tokens
        parts: list[bytes | memoryview] = []
        num_walked = 0
        while left > 0:
            known = self._recent.get(call.number)
            if known is not None and len(known) >= left * TOKEN_BYTES:
                parts.append(memoryview(known)[: left * TOKEN_BYTES])
                break
            own = left - call.base_tokens
            if own > 0:
                parts += call.own_parts(own)
                left -= own
            if call.started.base < 0:
                break
            call, num_walked = self._calls[call.started.base], num_walked + 1
        sequence = b"".join(reversed(parts))
        if num_walked > REMEMBER_FROM:
            self._remember(number, sequence)
        return unpack(sequence, TOKEN)

    def _remember(self, number: int, sequence: bytes) -> None:
        """Sequences only grow, so a part of one stays true."""
        self._recent[number] = sequence
        while len(self._recent) > RECENT_SEQUENCES:
            del self._recent[next(iter(self._recent))]

    def answer_ids(self, number: int) -> list[int]:
        """Tokens of the whole answer, those sampled by the abandoned calls that it continues included."""
        call = self._calls[number]
        total = call.num_answer
        return self.sequence(number)[call.num_tokens - total :].tolist() if total else []

    def num_distinct(self) -> int:
        """Tokens stored."""
        return sum(call.num_context + call.num_sampled for call in self._calls.values())

    def records(self) -> list[CallRecord]:
        """The records of all calls, call by call."""
        return [record for call in self for record in call.records()]
