"""The recorded calls of one execution, in whatever order their events arrive. Legend: `S` sampled tokens of one call.

A call's *row* is the sequence of tokens that the engine saw and made for it:
`row(base)[:base_tokens] + context + sampled`. Only the last two are stored (the call's *own* tokens), so memory grows
with new tokens, never with calls times context.
"""

from __future__ import annotations

import numpy as np

from qwengyre.core.arrays import LOGPROB, TOKEN, VERSION, unpack
from qwengyre.core.errors import CallOutOfOrder, TokenCountMismatch
from qwengyre.core.ids import CallId, ServerId
from qwengyre.trajectory.records import CallEvent, CallFinished, CallStarted, TokensSampled


class RecordedCall:
    """One call while and after it is recorded. The events of one call are in order; those of different calls are not."""

    __slots__ = ("_logprobs", "_sampled", "_started", "_versions", "call", "context", "finished", "servers")

    def __init__(self, call: CallId):
        self.call = call
        self._started: CallStarted | None = None
        self.finished: CallFinished | None = None
        self.servers: list[ServerId] = []
        """The servers that made tokens, in order: more than one when the call moved."""
        self.context: np.ndarray = np.empty(0, TOKEN)
        """int32: prompt tokens after what is shared with the base."""
        self._sampled, self._logprobs = bytearray(), bytearray()
        self._versions: list[tuple[int, int]] = []
        """(index of its first sampled token, policy version) of each run of equal version."""

    def start(self, event: CallStarted) -> None:
        if self._started is not None:
            raise CallOutOfOrder(self.call, "started twice")
        if event.base_tokens < 0 or (event.base is None and event.base_tokens):
            raise CallOutOfOrder(self.call, f"shares {event.base_tokens} tokens with base {event.base}")
        self._started, self.context = event, unpack(event.context_ids, TOKEN)

    def add(self, event: TokensSampled) -> None:
        if self.finished is not None:
            raise CallOutOfOrder(self.call, "sampled tokens after it finished")
        num_tokens, num_logprobs = len(event.token_ids) // TOKEN.itemsize, len(event.logprobs) // LOGPROB.itemsize
        if num_tokens != num_logprobs:
            raise TokenCountMismatch(self.call, num_tokens=num_tokens, num_logprobs=num_logprobs)
        if num_tokens and (not self._versions or self._versions[-1][1] != event.version):
            self._versions.append((self.num_sampled, event.version))
        if not self.servers or self.servers[-1] != event.server:
            self.servers.append(event.server)
        self._sampled += event.token_ids
        self._logprobs += event.logprobs

    def finish(self, event: CallFinished) -> None:
        if self.finished is not None:
            raise CallOutOfOrder(self.call, "finished twice")
        if event.num_sampled != self.num_sampled:
            raise CallOutOfOrder(self.call, f"finished with {event.num_sampled} tokens, but {self.num_sampled} were recorded")
        if not 0 <= event.num_masked <= self.num_sampled:
            raise CallOutOfOrder(self.call, f"{event.num_masked} tokens after its stop string, but it has {self.num_sampled}")
        self.finished = event

    @property
    def is_started(self) -> bool:
        return self._started is not None

    @property
    def started(self) -> CallStarted:
        """Of a call whose start is known."""
        assert self._started is not None, f"{self.call} has no start"
        return self._started

    @property
    def num_context(self) -> int:
        return len(self.context)

    @property
    def num_sampled(self) -> int:
        return len(self._sampled) // TOKEN.itemsize

    @property
    def num_masked(self) -> int:
        """Last sampled tokens that came with or after a stop string."""
        return self.finished.num_masked if self.finished is not None else 0

    @property
    def num_own(self) -> int:
        """Tokens that this call stores itself: its context after the base, then what it sampled."""
        return self.num_context + self.num_sampled

    @property
    def base_tokens(self) -> int:
        return self.started.base_tokens

    @property
    def row_tokens(self) -> int:
        return self.base_tokens + self.num_own

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
        for first, version in self._versions:
            version_S[first:] = version
        return version_S

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions in the order in which they sampled."""
        return tuple(version for _, version in self._versions)

    @property
    def own_ids(self) -> np.ndarray:
        """int32: the tokens this call stores itself."""
        return np.concatenate([self.context, self.sampled_S])

    @property
    def is_answered(self) -> bool:
        """The client got the whole answer: only then is it trained for its own sake."""
        return self.finished is not None and not self.finished.abandoned and self.finished.reason != "error"

    @property
    def order(self) -> tuple[float, int, str]:
        """Sorts calls as they reached the gateway: by time, then by the number at the end of the id."""
        digits = self.call[len(self.call.rstrip("0123456789")) :]
        return (self.started.at, int(digits) if digits else -1, self.call)


class CallLog:
    """Collects the events of one execution. Any interleaving of the same events gives the same calls."""

    def __init__(self) -> None:
        self._calls: dict[CallId, RecordedCall] = {}

    def apply(self, event: CallEvent) -> RecordedCall:
        """Record one event. Raises CallOutOfOrder or TokenCountMismatch for a record that contradicts itself."""
        call = self._calls.get(event.call)
        if call is None:
            call = self._calls[event.call] = RecordedCall(event.call)
        match event:
            case CallStarted():
                call.start(event)
            case TokensSampled():
                call.add(event)
            case CallFinished():
                call.finish(event)
        return call

    @property
    def started(self) -> dict[CallId, RecordedCall]:
        """Calls whose start is known, in the order in which they reached the gateway."""
        calls = sorted((call for call in self._calls.values() if call.is_started), key=lambda call: call.order)
        return {call.call: call for call in calls}

    @property
    def unstarted(self) -> list[CallId]:
        """Calls of which tokens were recorded, but no start."""
        return sorted(call.call for call in self._calls.values() if not call.is_started)
