"""When a process is lost: it has ended, or it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from qwengyre.core.errors import QwenGyreError

MISSES_UNTIL_LOST: Final = 3
"""In a row: one alone can be a long garbage collection, or a machine with too much to do."""
HEARTBEATS_PER_ANSWER: Final = 5
"""How long an answer may take. A stalled process is lost after 3 * (5 + 1) heartbeats at most."""


async def wait_lost(ended: Coroutine[Any, Any, str], ping: Callable[[float], Awaitable[object]], heartbeat_s: float) -> str:
    """Until `ended` returns, or a heartbeat was missed three times in a row; the reason in words.

    `ping(timeout_s)` is one heartbeat: it raises a QwenGyreError when it is missed. Any other error is the reason at once.
    """
    watching = [asyncio.create_task(ended), asyncio.create_task(_missed(ping, heartbeat_s))]
    try:
        await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in watching if task.done())
        return str(first.exception() or first.result())
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _missed(ping: Callable[[float], Awaitable[object]], heartbeat_s: float) -> str:
    misses, reason = 0, ""
    while misses < MISSES_UNTIL_LOST:
        await asyncio.sleep(heartbeat_s)
        try:
            await ping(heartbeat_s * HEARTBEATS_PER_ANSWER)
            misses = 0
        except QwenGyreError as error:
            misses, reason = misses + 1, str(error)
    return f"it missed its heartbeats: {reason}"
