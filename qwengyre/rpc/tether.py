"""`python -m qwengyre.rpc.tether PARENT MODULE ARGUMENTS`: a module as a program that ends with the process that started it.

The kernel ends it, at once, also while it is stopped (SIGSTOP): a pipe that closes, or a poll of the parent's id, would need a child
that runs. Nothing is lost by that: what must outlast a process is in a journal or in a checkpoint before anybody hears of it.

The kernel goes by the thread that started the child. Processes are started from threads that live as long as their process does: the
main thread, or the event loop of a Ray actor.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when its parent ends; `parent` is who that was when it was started."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def tethered(module: str, arguments: Sequence[str]) -> list[str]:
    """The command of a child of this process."""
    return [sys.executable, "-m", "qwengyre.rpc.tether", str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
