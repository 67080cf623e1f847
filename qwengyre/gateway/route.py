"""Which server an execution's calls go to. None holds them."""

from __future__ import annotations

import asyncio

from qwengyre.core.ids import ServerId


class ExecutionRoute:
    def __init__(self) -> None:
        self.server: ServerId | None = None
        self.generation = 0
        """Grows with every change, also when the server behind the same name came back."""
        self._changed = asyncio.Event()

    def set(self, server: ServerId | None) -> None:
        self.server = server
        self.touch()

    def touch(self) -> None:
        """Wake whoever waits: something about the route or its server is new."""
        self.generation += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_changed(self, *, since: int | None = None, at_most_s: float | None = None) -> None:
        """Until the generation is above `since` (the present one, without it), or `at_most_s` have passed."""
        generation = self.generation if since is None else since
        try:
            async with asyncio.timeout(at_most_s):
                while self.generation <= generation:
                    await self._changed.wait()
        except TimeoutError:
            return
