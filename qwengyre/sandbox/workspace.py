"""The folder that a harness works in: made from the task, digested and copied for the evaluator.

What a harness leaves is hostile input: links are never followed, special files are never opened, sizes are bounded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.limits import MIB
from qwengyre.sandbox.task import NOT_COPIED, Task

CHUNK_BYTES = 1 << 20
MAX_DEPTH = 200
OVERSHOOT = 2
"""A workspace up to this many times over its disk limit is still scored: the watcher needs a moment to notice."""


def prepare_workspace(task: Task, target: Path) -> None:
    """Make `target` with a copy of the task's `environment/`, image descriptions left out. Raises OSError."""
    target.mkdir(parents=True)
    if task.environment.is_dir():
        with os.scandir(task.environment) as entries:
            for entry in entries:
                if entry.name not in NOT_COPIED:
                    _copy(entry.path, target / entry.name, _Digest(), _Budget(None))


def copy_workspace(source: Path, target: Path, limits: LimitsConfig) -> str:
    """Copy what a harness left to `target`, which must not exist, and return the digest of what was copied.

    The digest covers names, kinds, executable bits, link targets and contents, in sorted order. Sockets, pipes and devices are left out.
    Raises SandboxError when the workspace is too large or too deep to be scored.
    """
    digest = _Digest()
    _copy(os.fspath(source), target, digest, _Budget(limits))
    return digest.hexdigest()


class _Digest:
    def __init__(self):
        self._hash = hashlib.blake2b(digest_size=16)
        self.add = self._hash.update

    def entry(self, kind: bytes, name: str, size: int) -> None:
        """One entry; lengths are part of it, so that no two trees look alike."""
        encoded = os.fsencode(name)
        self.add(b"%s %d %d " % (kind, len(encoded), size) + encoded)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _Budget:
    """What may still be copied; None copies without a bound (the task's own files)."""

    def __init__(self, limits: LimitsConfig | None):
        self.num_bytes = None if limits is None else limits.disk_mb * MIB * OVERSHOOT
        self.num_files = None if limits is None else limits.files * OVERSHOOT

    def spend(self, num_bytes: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise SandboxError(f"the workspace is more than {MAX_DEPTH} folders deep")
        if self.num_bytes is None or self.num_files is None:
            return
        self.num_bytes -= num_bytes
        self.num_files -= 1
        if self.num_bytes < 0 or self.num_files < 0:
            raise SandboxError("the workspace is far beyond its limits (limits.disk_mb, limits.files)")


def _copy(source: str, target: Path, digest: _Digest, budget: _Budget, depth: int = 0) -> None:
    found = os.lstat(source)
    name = os.path.basename(source) if depth else ""
    if stat.S_ISLNK(found.st_mode):
        link = os.readlink(source)
        budget.spend(0, depth)
        digest.entry(b"l", name, len(os.fsencode(link)))
        digest.add(os.fsencode(link))
        os.symlink(link, target)
    elif stat.S_ISREG(found.st_mode):
        _copy_file(source, target, found, (digest, name, budget, depth))
    elif stat.S_ISDIR(found.st_mode):
        if found.st_mode & 0o700 != 0o700:
            os.chmod(source, found.st_mode | 0o700)
        names = sorted(os.listdir(source))
        budget.spend(0, depth)
        digest.entry(b"d", name, len(names))
        os.mkdir(target)
        for child in names:
            _copy(os.path.join(source, child), target / child, digest, budget, depth + 1)


def _copy_file(source: str, target: Path, found: os.stat_result, record: tuple[_Digest, str, _Budget, int]) -> None:
    digest, name, budget, depth = record
    budget.spend(found.st_size, depth)
    if found.st_mode & 0o400 == 0:
        os.chmod(source, found.st_mode | 0o400)
    digest.entry(b"x" if found.st_mode & 0o100 else b"f", name, found.st_size)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    mode = stat.S_IMODE(found.st_mode) & 0o777 | 0o600
    with (
        open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as reader,
        open(os.open(target, flags, mode), "wb", buffering=CHUNK_BYTES) as writer,
    ):
        while data := reader.read(CHUNK_BYTES):
            digest.add(data)
            writer.write(data)


def move_tree(source: Path, target: Path) -> None:
    """Move what a harness left, also to another file system (special files are left out then). Raises OSError."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(os.fspath(source), target, _Digest(), _Budget(None))
        remove_tree(source)


def remove_tree(folder: Path) -> None:
    """Remove a folder that a harness may have made hard to remove (folders without permissions); fine if there is none.

    Raises OSError if something in it cannot be removed even so.
    """

    def make_removable(function: Callable, path: str, _: object) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if not os.path.isdir(path) or os.path.islink(path):
            return os.unlink(path)
        os.chmod(path, 0o700)
        if function is os.rmdir:
            return os.rmdir(path)
        os.listdir(path)  # what still cannot be entered raises here, and is not tried again
        remove_tree(Path(path))

    if folder.exists():
        shutil.rmtree(folder, onerror=make_removable)
