"""Children of this process: each ends with it (`rpc/tether.py`), and says when it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from qwengyre.core.errors import ProcessFailed
from qwengyre.rpc.logs import log_tail
from qwengyre.rpc.tether import tethered

POLL_S = 0.02
"""How often a parent looks for a file that a child writes."""
NUM_LINES_SHOWN = 15
"""Room for a traceback."""


def process_failed(name: str, reason: str, log_path: Path) -> ProcessFailed:
    return ProcessFailed(name, reason, log_path=str(log_path), tail=_shown(log_path))


def _shown(log_path: Path) -> str:
    """The last lines of a log, for a terminal."""
    lines = log_tail(log_path, num_bytes=16_384).splitlines()[-NUM_LINES_SHOWN:]
    return "\n".join(f"  {line}" for line in lines) or "  (nothing printed)"


class Supervised:
    """One running child. `wait_exit` returns its exit code; `stop` ends it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name, self.log_path = name, log_path
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_exit(self) -> int:
        return await self._process.wait()

    async def stop(self, timeout_s: float = 5.0) -> None:
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)


async def start_process(
    module: str,
    arguments: Sequence[str],
    log_path: Path,
    ready_file: Path,
    *,
    env: Mapping[str, str],
    timeout_s: float,
) -> Supervised:
    """Start `python -m module ARGUMENTS` and wait until it writes `ready_file`. Its name is the log file's stem. Raises ProcessFailed."""
    name = log_path.stem
    ready_file.unlink(missing_ok=True)
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *tethered(module, arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **env},
            start_new_session=True,
        )
    child = Supervised(name, process, log_path)
    try:
        async with asyncio.timeout(timeout_s):
            while not ready_file.exists():
                if process.returncode is not None:
                    raise process_failed(name, f"ended with exit code {process.returncode} before it served", log_path)
                await asyncio.sleep(POLL_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        child.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise process_failed(name, f"did not serve within {timeout_s:g} s", log_path) from None
        raise
    return child


def announce(path: Path, content: bytes) -> None:
    """Write a file that somebody waits for: whole, or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.rename(path)
