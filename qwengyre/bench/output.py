"""How every bench speaks to people: to standard error, since its results may go to standard output."""

from __future__ import annotations

import sys


def say(line: str = "") -> None:
    """A line for people."""
    print(line, file=sys.stderr, flush=True)
