"""Calls of hooks in the controller: in threads of their own, so many at once, each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from qwengyre.core.errors import HookFailed

Result = TypeVar("Result")


class HookThreads:
    """The event loop waits for none of them, and neither does the end of the program: a hook that hangs is left behind."""

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._room, self._timeout_s = asyncio.Semaphore(num_threads), timeout_s

    async def call(self, hook: str, job: Callable[[], Result]) -> Result:
        """The result of `job`. Raises what it raises, and HookFailed of `hook`, its key, past the deadline."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def tell(result: Result | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:  # of a thread: told to the loop, which raises it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is gone, and nobody waits
                loop.call_soon_threadsafe(tell, result, error)

        async with self._room:
            threading.Thread(target=run, name=hook, daemon=True).start()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await done
            except TimeoutError:
                raise HookFailed(hook, f"it took more than {self._timeout_s:g} s (hooks.timeout_s)") from None
