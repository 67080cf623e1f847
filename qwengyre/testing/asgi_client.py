"""An HTTP client for an ASGI application in this process that sees every chunk as it leaves, and can hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any


class Exchange:
    """One request and what has come back of the answer."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.chunks: list[bytes] = []
        self.is_done = False
        self._changed = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def num_events(self) -> int:
        """Server-sent events so far."""
        return self.body.count(b"\n\n")

    async def wait_until(self, holds: Callable[[Exchange], bool]) -> None:
        """Until `holds` or the answer has ended."""
        while not holds(self) and not self.is_done:
            self._changed.clear()
            await self._changed.wait()

    async def finish(self) -> Exchange:
        await self.task
        return self

    async def hang_up(self) -> None:
        """Close the connection and let the application notice."""
        self._left.set()
        await self.task

    def _take(self, message: Mapping[str, Any]) -> None:
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            part = message.get("body", b"")
            self.chunks.append(part)
            self.body += part
            self.is_done = not message.get("more_body", False)
        self._changed.set()


def begin(
    app: Callable[..., Awaitable[None]], method: str, path: str, *, headers: Mapping[str, str], body: bytes = b""
) -> Exchange:
    """Send a request; the answer arrives in the Exchange while the event loop runs."""
    exchange = Exchange()
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()],
    }
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Mapping[str, Any]:
        request = next(sent, None)
        if request is not None:
            return request
        await exchange._left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        exchange._take(message)
        await asyncio.sleep(0)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            exchange.is_done = True
            exchange._changed.set()

    exchange.task = asyncio.ensure_future(run())
    return exchange
