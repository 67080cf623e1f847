"""What is cancelled before a thread took it up, and while one is at it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qwengyre.sandbox.disk_threads import DiskThreads


async def test_what_waits_for_a_thread_is_cancelled_at_once_and_what_runs_is_waited_for():
    threads, go_on, began, done = DiskThreads(1), threading.Event(), threading.Event(), []

    def first() -> None:
        began.set()
        go_on.wait()
        done.append("first")

    running = asyncio.create_task(threads.run(first))
    await asyncio.to_thread(began.wait)
    waiting = asyncio.create_task(threads.run(done.append, "second"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert done == ["first"]
    threads.close()
