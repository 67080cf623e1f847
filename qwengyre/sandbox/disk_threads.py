"""Threads for whatever walks, copies or removes a folder: no event loop waits for one that a harness filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

NUM_THREADS: Final = 4
"""More copies at once would wait for the same disk."""

P = ParamSpec("P")
T = TypeVar("T")


class DiskThreads:
    """A pool of its own: what trees and steps are computed in is never full of copies."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="workspaces")

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call `function` in a thread. Cancelled, it comes back once the call has ended: nobody else may touch the folder before."""
        submitted = self._pool.submit(function, *arguments, **named)
        job = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if not submitted.cancel():
                await asyncio.wait([job])
                job.exception()  # seen: it counts no more
            raise

    def close(self) -> None:
        self._pool.shutdown()
