"""What one execution may have of the gateway at once, so that whatever it does the others' calls and the heartbeat go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.protocol.fields import InvalidRequest


class Budget:
    """Of one execution. `turn` is held while a request is read, matched or encoded: an execution has one of these at a time, and
    executions take turns in the order in which they ask."""

    def __init__(self, config: GatewayConfig):
        self._config = config
        self.turn = asyncio.Lock()
        self.num_requests = 0
        """Requests whose answer has not begun: their bodies arrive, they wait for their turn, or their tokens are counted."""
        self.body_bytes = 0
        """Of these requests."""

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
