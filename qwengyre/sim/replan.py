"""`python -m qwengyre.sim.replan`: evidence on standard input, a plan or nothing on standard output, both as msgpack.

It yields to everything else on the machine: a plan that comes a step later costs less than a cell that waits.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from qwengyre.sim.tuning import Evidence, replan

NICE: Final = 10
"""Half way to the least, so that it still ends on a machine whose processors are all busy."""

if __name__ == "__main__":
    os.nice(NICE)
    evidence = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Evidence)
    sys.stdout.buffer.write(msgspec.msgpack.encode(replan(evidence)))
