"""One child process, waited for through its pidfd: no thread, no SIGCHLD handler, any number at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

KILL_GRACE_S = 5.0
"""How long a supervisor without a pid namespace may take to kill its descendants before its group is killed."""


class Process:
    """A started program, made inside a running event loop. `kill`, or an awaited end, must come before it is dropped."""

    def __init__(self, popen: subprocess.Popen[bytes], *, in_pid_namespace: bool, lifeline: int = -1):
        self._popen = popen
        self._lifeline = lifeline
        self._in_pid_namespace = in_pid_namespace
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._lifeline >= 0:
            os.close(self._lifeline)
        code = self._popen.wait()
        self._exited.set_result(code if code >= 0 else 128 - code)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None, "started with a pipe"
        return self._popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._popen.stdout is not None, "started with a pipe"
        return self._popen.stdout

    def close_pipes(self) -> None:
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit code, 128 + signal when killed; None at the timeout. Under bwrap every process of the sandbox has ended then."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._exited)
        except TimeoutError:
            return None

    async def kill(self) -> int:
        """Kill everything in the sandbox and wait until it is gone; safe to call at any time, also when cancelled."""
        if not self._exited.done():
            self._send_kill()
        return await asyncio.shield(asyncio.ensure_future(self._ended()))

    def _send_kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self._in_pid_namespace:
                os.kill(self.pid, signal.SIGTERM)
                return
            # Process 1 of the namespace is bwrap's only child. When it dies the kernel kills the rest, and bwrap ends after that.
            for child in children(self.pid) or (self.pid,):
                os.kill(child, signal.SIGKILL)

    async def _ended(self) -> int:
        code = await self.wait(KILL_GRACE_S)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = await self.wait()
        assert code is not None, "waited without a timeout"
        return code


def children(pid: int) -> tuple[int, ...]:
    """Child processes of a process; none when it has ended. Under bwrap its only child is process 1 of the sandbox."""
    try:
        return tuple(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return ()


async def wait_readable(fd: int) -> None:
    """Return once `fd` is readable (a pidfd is, from the end of its process on)."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await readable
    finally:
        loop.remove_reader(fd)


class Program(msgspec.Struct, frozen=True):
    """What to start (`spawner.py`), and with which descriptors."""

    command: Sequence[str]
    env: dict[str, str]
    """All of its environment."""
    output: int
    """Takes standard error, and standard output unless `stdout` is given."""
    stdin: int = subprocess.DEVNULL
    stdout: int | None = None
    pass_fds: Sequence[int] = ()
    handed_fds: Sequence[int] = ()
    """Passed too, and closed here once the program is started, or cannot be."""
    executable: str = ""
    """What is executed, if not `command[0]`."""
    lifeline: int = -1
    """The write end of a pipe, closed when the program has ended (or this process has)."""
    is_sandbox: bool = False
    """The program is bubblewrap with a pid namespace of its own."""


def run(program: Program, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, its output as text. Raises OSError and subprocess.TimeoutExpired."""
    try:
        return subprocess.run(
            program.command,
            env=program.env,
            capture_output=True,
            text=True,
            stdin=program.stdin,
            pass_fds=(*program.pass_fds, *program.handed_fds),
            timeout=timeout_s,
            check=False,
        )
    finally:
        for fd in program.handed_fds:
            os.close(fd)


def nameless_file(name: str, data: bytes) -> int:
    """A descriptor of a file in memory with `data`, read from its start: what it holds is in no argument, path or variable."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    rest = memoryview(data)
    while rest:
        rest = rest[os.pwrite(fd, rest, len(data) - len(rest)) :]
    return fd
