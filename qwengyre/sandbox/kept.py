"""What is kept of executions after their end, to be looked at: the failed ones, and a few of every kind of reward."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End, Outcome
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import HarnessFiles
from qwengyre.sandbox.limits import MIB
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.tree import change_owner, measure, remove_tree
from qwengyre.sandbox.workspace import keep_copy, move_tree

log = logging.getLogger(__name__)

FAILED: Final = frozenset({End.CRASHED, End.NEVER_CALLED, End.EVALUATOR_FAILED, End.SETUP_FAILED, End.OVERALL_TIMEOUT})
SAMPLES_PER_REWARD: Final = 4
"""Of each of: the lowest reward, one in between, the highest."""
SAMPLE_PERIOD_S: Final = 20.0
"""A full sample takes a newer execution this often at most: else each of thousands of workspaces would be copied."""


class Sample(msgspec.Struct, frozen=True):
    """One kept execution that did not fail."""

    folder: Path
    num_bytes: int
    at: float


class Keeper:
    """Moves folders of ended executions to where they are kept, or removes them. Called in threads, one execution in each."""

    def __init__(self, config: HarnessConfig, failed: Path, sample: Path | None):
        self._config, self._failed, self._sample = config, failed, sample
        self._lock = threading.Lock()
        self._num_failed = 0
        self._samples: dict[str, deque[Sample]] = {}
        """Kind of reward -> what is kept of it, the newest last."""

    def put_away(self, files: HarnessFiles, outcome: Outcome, task: Task) -> None:
        """Move what is to be kept. The rest is the caller's to remove. Raises SandboxError when the disk is full."""
        target = self._target(files, outcome, task) if files.folder.exists() else None
        if target is not None:
            try:
                self._move(files, target, outcome, task)
            except OSError as error:
                raise_if_disk_full(error, target.parent)
                log.warning("workspace_not_kept", extra={"execution": files.folder.name, "reason": str(error)})

    def _target(self, files: HarnessFiles, outcome: Outcome, task: Task) -> Path | None:
        folder = files.folder
        with self._lock:
            if outcome.end in FAILED and self._num_failed < self._config.keep_failed:
                self._num_failed += 1
                return self._failed / folder.name
        if self._sample is None or self._config.keep == "failed" or outcome.end is End.LOST:
            return None
        if self._config.keep == "all" or self._takes(files, outcome, task):
            return self._sample / folder.name
        return None

    def _takes(self, files: HarnessFiles, outcome: Outcome, task: Task) -> bool:
        """Whether the sample has room for this one, perhaps in place of older ones, which are removed then."""
        assert self._sample is not None, "asked only where a sample is kept"
        low, high = task.reward_range
        kind = "lowest" if outcome.score <= low else "highest" if outcome.score >= high else "between"
        folder, max_files, now = files.folder, self._config.limits.files * 2, time.monotonic()
        places = [folder, files.workspace] if files.is_apart else [folder]
        num_bytes = sum(measure(place, max_files).num_bytes for place in places)
        with self._lock:
            kept = self._samples.setdefault(kind, deque())
            is_full = len(kept) >= SAMPLES_PER_REWARD
            if num_bytes > self._config.keep_sample_mb * MIB or (is_full and now - kept[-1].at < SAMPLE_PERIOD_S):
                return False
            removed = [kept.popleft()] if is_full else []
            kept.append(Sample(self._sample / folder.name, num_bytes, now))
            while sum(one.num_bytes for some in self._samples.values() for one in some) > self._config.keep_sample_mb * MIB:
                oldest = min((some for some in self._samples.values() if some), key=lambda some: some[0].at)
                removed.append(oldest.popleft())
        for one in removed:
            remove_tree(one.folder)
        return True

    def _move(self, files: HarnessFiles, target: Path, outcome: Outcome, task: Task) -> None:
        folder = files.folder
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(folder / "scratch")
        remove_tree(target)
        if files.is_apart and files.workspace.exists():
            keep_copy(files.workspace, folder / "workspace")
            files.space.remove()
            remove_tree(files.space.seen)
        if os.geteuid() == 0:
            change_owner(folder, 0)
        move_tree(folder, target)
        said = {"task": task.name, **msgspec.to_builtins(outcome)}
        (target / "outcome.json").write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n")


def raise_if_disk_full(error: Exception, work: Path) -> None:
    """A full disk stops the run: every further execution would fail the same way."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(work).free // MIB
        raise SandboxError(f"no space left for workspaces in {work} ({free} MB free): free some, and resume the run") from error
