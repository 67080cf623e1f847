"""Deadlines that pass at once, in place of short ones that a slow machine passes too early."""

from __future__ import annotations

import asyncio


def put_forward(seconds: float) -> None:
    """Let so much time pass by the clock of the running event loop. Timers that are due then go off; nobody sleeps."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds
