"""Memory of a process tree, and how much of the cells' time was work."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


class MemoryMeter:
    """Sum of PSS over `root` (default: this process) and all its descendants, and the largest sum seen.

    PSS divides each shared page among those who map it, so nothing is counted twice. A sample reads one small file per
    process and costs some milliseconds: call it from a thread every few seconds.
    """

    def __init__(self, root: int | None = None, proc: str | Path = "/proc"):
        self.root = os.getpid() if root is None else root
        self.peak_bytes = 0
        self._proc = Path(proc)

    def sample(self) -> int:
        """Bytes now. Processes that end during the sample count 0."""
        total = sum(self._pss_bytes(pid) for pid in self._tree())
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _tree(self) -> list[int]:
        children: dict[int, list[int]] = defaultdict(list)
        for entry in self._proc.iterdir():
            if entry.name.isdecimal():
                parent = _parent_of(entry)
                if parent is not None:
                    children[parent].append(int(entry.name))
        found, waiting = [], [self.root]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            waiting.extend(children[pid])
        return found

    def _pss_bytes(self, pid: int) -> int:
        process = self._proc / str(pid)
        try:
            match = _PSS.search((process / "smaps_rollup").read_bytes())
            return int(match[1]) * 1024 if match else 0
        except PermissionError:
            return _private_bytes(process)
        except (FileNotFoundError, ProcessLookupError):
            return 0


def _private_bytes(process: Path) -> int:
    """Resident without shared pages, for a process whose maps may not be read (harnesses are not dumpable).

    Pages that a fork shares are counted in each process: never less than PSS of private memory.
    """
    try:
        _, resident, shared, *_ = (process / "statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _parent_of(process: Path) -> int | None:
    try:
        stat = (process / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # "pid (name) state ppid ...", and the name may hold spaces and parentheses.
    return int(stat[stat.rindex(b")") + 1 :].split()[1])


class WorkMeter:
    """Adds up busy seconds of cells from counters that only grow, and restart at 0 with their process.

    >>> meter = WorkMeter()
    >>> meter.observe(0, "engine", 3.0)
    >>> meter.observe(0, "engine", 1.0)   # a new process
    >>> meter.observe(1, "trainer", 4.0)
    >>> meter.idle_share(num_cells=2, elapsed_s=8.0)
    0.5
    """

    def __init__(self, before_s: float = 0.0) -> None:
        """`before_s`: busy seconds of earlier lives of the run."""
        self._before_s = before_s
        self._last: dict[tuple[int, str], float] = {}
        self.busy_s: dict[int, float] = defaultdict(float)
        """By cell."""

    def observe(self, cell: int, source: str, total_s: float) -> None:
        """`source` of `cell` has been busy for `total_s` since its process started."""
        before = self._last.get((cell, source), 0.0)
        self.busy_s[cell] += total_s - before if total_s >= before else total_s
        self._last[cell, source] = total_s

    def add(self, cell: int, seconds: float) -> None:
        """Work that has no counter: a role switch, an optimizer step."""
        self.busy_s[cell] += seconds

    def idle_share(self, *, num_cells: int, elapsed_s: float) -> float:
        """1 - busy time / (cells x elapsed time), within [0, 1]; 0 before anything has elapsed."""
        if elapsed_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - (self._before_s + sum(self.busy_s.values())) / (num_cells * elapsed_s)))
