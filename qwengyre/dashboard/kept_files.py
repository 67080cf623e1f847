"""What a run kept of an execution: its workspace and its logs. A harness wrote all of it, so no link in it is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError

MAX_FILES: Final = 2000
"""Listed; more are counted by nobody who looks."""
MAX_SHOWN_BYTES: Final = 256 << 10
"""Of one file: more than anyone reads in a page."""
LOGS: Final = (("harness.log", "Harness output"), ("verifier.log", "Evaluator log"), ("instruction.md", "Instruction"))
"""File beside the workspace, and what it is called."""
_NO_LINKS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class KeptFile(msgspec.Struct, frozen=True):
    path: str
    """Relative to the folder of the execution."""
    num_bytes: int
    is_regular: bool
    """False for a link, a pipe or a device: named, never opened."""


class KeptText(msgspec.Struct, frozen=True):
    text: str
    num_bytes: int
    """Of the whole file."""
    is_binary: bool = False

    @property
    def is_cut(self) -> bool:
        return self.num_bytes > MAX_SHOWN_BYTES


def list_kept(folder: Path) -> list[KeptFile]:
    """Files below `folder`, by path; none when nothing was kept."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        found: list[KeptFile] = []
        for file in _walk(fd, PurePosixPath()):
            found.append(file)
            if len(found) == MAX_FILES:
                break
    finally:
        os.close(fd)
    return sorted(found, key=lambda file: file.path)


def _walk(folder_fd: int, prefix: PurePosixPath) -> Iterator[KeptFile]:
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            path = prefix / entry.name
            if not entry.is_dir(follow_symlinks=False):
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                yield KeptFile(str(path), found.st_size, stat.S_ISREG(found.st_mode))
                continue
            try:
                fd = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            except OSError:
                continue
            try:
                yield from _walk(fd, path)
            finally:
                os.close(fd)


def read_kept(folder: Path, path: str) -> KeptText:
    """The beginning of a file below `folder`. Raises ConfigError for anything but a plain file there, a link on the way included."""
    parts = PurePosixPath(path).parts
    refused = ConfigError("there is no such file among what was kept", file=path)
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path:
        raise refused
    opened: list[int] = []
    try:
        opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        for part in parts[:-1]:
            opened.append(os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened[-1]))
        opened.append(os.open(parts[-1], _NO_LINKS, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode):
            raise refused
        data = os.read(opened[-1], MAX_SHOWN_BYTES)
    except OSError as error:
        raise refused from error
    finally:
        for fd in reversed(opened):
            os.close(fd)
    if b"\0" in data:
        return KeptText("", found.st_size, is_binary=True)
    return KeptText(data.decode("utf-8", errors="replace"), found.st_size)
