"""Looks at the spaces of running sandboxes, and ends those that pass their limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator
from typing import Final, Protocol

from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.disk_threads import DiskThreads
from qwengyre.sandbox.spaces import Space

PERIOD_S: Final = 1.0  # what one second can write is what a limit on disk may be passed by
MAX_SHARE: Final = 0.1
"""Of its time, at most, that one folder is looked at: one that takes long is looked at less often."""
MAX_DISTURBED: Final = 5
"""Looks in a row that may fail, as when folders are moved about; what moves them for longer hides what it holds."""


class Killable(Protocol):
    def kill(self) -> Awaitable[object]: ...


class Watched:
    """One space that is looked at; `reason` says which limit it passed, if any."""

    def __init__(self, space: Space, process: Killable, times: int):
        self.space, self.process, self.times = space, process, times
        self.reason = ""
        self.due = 0.0
        self.num_disturbed = 0


class DiskWatch:
    """Kills the process of each space that passes `limits`. Looks at one at a time, in a thread of its own."""

    def __init__(self, limits: LimitsConfig):
        self._limits = limits
        self._threads = DiskThreads(1)
        self._watched: set[Watched] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="disk watch")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._threads.close()

    @contextlib.contextmanager
    def watching(self, space: Space, process: Killable, times: int = 1) -> Iterator[Watched]:
        """Look at `space`, which may hold `times` as much as the limits say, every second while the block runs."""
        watched = Watched(space, process, times)
        self._watched.add(watched)
        try:
            yield watched
        finally:
            self._watched.discard(watched)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            for watched in [one for one in self._watched if one.due <= time.monotonic()]:
                if watched in self._watched and not watched.reason:
                    await self._look(watched)

    async def _look(self, watched: Watched) -> None:
        began = time.monotonic()
        watched.reason = await self._threads.run(self._passed, watched)
        ended = time.monotonic()
        watched.due = ended + (ended - began) / MAX_SHARE
        if watched.reason and watched in self._watched:
            await watched.process.kill()

    def _passed(self, watched: Watched) -> str:
        """In the thread: which limit the space passes, as a sentence; empty when none."""
        try:
            reason = watched.space.usage().over(self._limits, watched.times)
        except OSError as error:  # FolderMoved among them
            watched.num_disturbed += 1
            unmeasured = (
                f"the workspace could not be measured against limits.disk_mb {MAX_DISTURBED} times in a row: {error.strerror}"
            )
            return unmeasured if watched.num_disturbed >= MAX_DISTURBED else ""
        watched.num_disturbed = 0
        return reason
