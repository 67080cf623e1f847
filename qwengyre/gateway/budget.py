"""What one execution may have of the gateway, at once and in all, so that whatever it does the others' calls and the heartbeat go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.protocol.fields import InvalidRequest

FREE_S: Final = 0.01
"""Time of the event loop, or of the interpreter's lock, that one request may take without being counted. Others wait no longer for it."""
BURST_S: Final = 5.0
"""What requests that take more may have together at first, and after a long rest: two hundred calls of an execution of 700,000 tokens, which take
23 ms each (docs/gateway.md)."""
SHARE: Final = 1 / 200
"""Of the loop's time, that they may have in the long run: of a hundred calls of others less than one meets them."""


class Budget:
    """Of one execution."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self._turn = asyncio.Lock()
        self._busy_s, self._credit_s, self._refilled_at = 0.0, BURST_S, clock()
        self._journal_bytes = 0
        self.num_requests = 0
        """Requests whose answer has not begun: their bodies arrive, they wait for their turn, or their tokens are counted."""
        self.body_bytes = 0
        """Of these requests."""

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Held while a request is read, matched or encoded: an execution has one of these at a time, in the order in which it asked, and
        waits when it kept the gateway `busy` for more than its share."""
        async with self._turn:
            if self._refill() < 0:
                await asyncio.sleep(-self._credit_s / SHARE)
            self._busy_s = 0.0
            try:
                yield
            finally:
                if self._busy_s > FREE_S:
                    self._credit_s -= self._busy_s

    def _refill(self) -> float:
        now = self._clock()
        self._credit_s = min(BURST_S, self._credit_s + SHARE * (now - self._refilled_at))
        self._refilled_at = now
        return self._credit_s

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Around what this thread does for the request that has the turn while nothing else of the gateway runs."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._busy_s += time.thread_time() - began

    def journal(self, num_bytes: int) -> None:
        """So much was recorded of this execution."""
        self._journal_bytes += num_bytes

    def check_journal(self) -> None:
        """Raises InvalidRequest (403, which no client tries again) when more is recorded of this execution than may be."""
        most = self._config.max_journal_bytes_per_execution
        if self._journal_bytes >= most:
            message = f"this execution has recorded {self._journal_bytes} bytes of calls, and may {most} (gateway.max_journal_bytes_per_execution)"
            raise InvalidRequest(message, status=403, code="execution_over_budget")

    @contextlib.contextmanager
    def request(self) -> Iterator[Taken]:
        """Count one request until its call has started. Raises InvalidRequest (429) for one too many."""
        if self.num_requests >= self._config.max_calls_per_execution:
            raise InvalidRequest("too many requests at once for this execution", status=429, code="too_many_requests")
        self.num_requests += 1
        taken = Taken(self, self._config.max_unread_bytes_per_execution)
        try:
            yield taken
        finally:
            self.num_requests -= 1
            self.body_bytes -= taken.num_bytes


class Taken:
    """Bytes that one request has of its execution's budget."""

    def __init__(self, budget: Budget, most: int):
        self._budget, self._most = budget, most
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises InvalidRequest (429) when the execution's requests would be larger together than they may be."""
        if self._budget.body_bytes + num_bytes > self._most:
            raise InvalidRequest("the requests of this execution are too large together", status=429, code="too_many_bytes")
        self._budget.body_bytes += num_bytes
        self.num_bytes += num_bytes
