"""`python -m qwengyre.rpc.supervised MODULE ARGUMENTS`: a module as a program that the kernel kills when its parent ends.

Even while it is stopped (SIGSTOP), when it could not notice by itself.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
