"""A child that serves and sleeps: `python -m tests.unit.rpc.sleeper READY`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from qwengyre.rpc.processes import announce

if __name__ == "__main__":
    announce(Path(sys.argv[1]), str(os.getpid()).encode())
    time.sleep(3600)
