"""Folders that others filled: walked, measured, removed. No depth, name or link in them can lead out, or end the walk.

Nothing here recurses, builds a path from hostile names, or follows a link: a walk holds the one folder that it is in and goes back by
`..`, so that neither the interpreter's stack, the kernel's longest path nor the number of descriptors bounds how deep it may go.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READABLE_FOLDER: Final = stat.S_IRUSR | stat.S_IXUSR
CHANGED: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What opening a folder says when something else took its name after it was listed."""


class FolderMoved(OSError):
    """A folder was moved while a walk was in it: what lies beside it cannot be found from there."""


class Kind(Enum):
    ENTRY = "entry"
    """A file, a link or a special file."""
    FOLDER = "folder"
    """Before what is in it."""
    LEFT = "left"
    """The same folder, after what was in it."""


class Visit(NamedTuple):
    kind: Kind
    parent: int
    """Descriptor of the folder that it lies in, until the walk goes on."""
    name: str


Listing = Callable[[int], list[tuple[str, bool]]]
"""Names in an open folder, each with whether it is a folder itself."""


def listing(folder: int, at_most: int | None = None) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, at_most)]


def open_folder(path: str | os.PathLike[str], parent: int | None = None, *, forced: bool = True) -> int:
    """A descriptor of a folder. Never follows a link. `forced`: adds permissions to read it that its owner took from himself."""
    try:
        folder = os.open(path, FOLDER, dir_fd=parent)
        if not forced or os.fstat(folder).st_mode & READABLE_FOLDER == READABLE_FOLDER:
            return folder
        os.close(folder)
    except PermissionError:
        if not forced:
            raise
    _permit(path, parent, READABLE_FOLDER)
    return os.open(path, FOLDER, dir_fd=parent)


def open_file(name: str, parent: int, *, forced: bool = True) -> int:
    """A descriptor to read a regular file with, or whatever took its name: a pipe is not waited for, a link not followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except PermissionError:
        if not forced:
            raise
    _permit(name, parent, stat.S_IRUSR)
    return os.open(name, flags, dir_fd=parent)


def _permit(path: str | os.PathLike[str], parent: int | None, bits: int) -> None:
    """Add permissions to exactly what is there now: chmod by name would follow a link that took its place."""
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        mode = os.fstat(found).st_mode
        if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(mode) | bits)
    finally:
        os.close(found)


def walk(root: int, names: Listing = listing, *, forced: bool = True) -> Iterator[Visit]:
    """Everything below the folder that is open as `root`, depth first, in the order of `names`. One descriptor at a time.

    `forced`: see `open_folder`. A folder that is replaced after it was listed has no contents. Raises FolderMoved when one is moved away while
    the walk is in it, and OSError.
    """
    folder = os.dup(root)
    pending = names(folder)[::-1]
    above: list[tuple[tuple[int, int], str, list[tuple[str, bool]]]] = []
    try:
        while pending or above:
            if not pending:
                identity, name, pending = above.pop()
                folder = _replace(folder, os.open("..", FOLDER, dir_fd=folder))
                if _identity(folder) != identity:
                    raise FolderMoved(errno.ESTALE, "a folder was moved while it was looked at")
                yield Visit(Kind.LEFT, folder, name)
                continue
            name, is_folder = pending.pop()
            yield Visit(Kind.FOLDER if is_folder else Kind.ENTRY, folder, name)
            if is_folder:
                try:
                    inner = open_folder(name, folder, forced=forced)
                except OSError as error:
                    if error.errno not in CHANGED:
                        raise
                    yield Visit(Kind.LEFT, folder, name)
                    continue
                above.append((_identity(folder), name, pending))
                folder = _replace(folder, inner)
                pending = names(folder)[::-1]
    finally:
        os.close(folder)


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def _replace(folder: int, other: int) -> int:
    os.close(folder)
    return other


def remove_tree(folder: Path) -> None:
    """Remove a folder, however its owner meant to make that hard; fine if there is none. Raises OSError."""
    try:
        root = open_folder(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in CHANGED:
            raise
        folder.unlink()
        return
    try:
        for kind, parent, name in walk(root):
            if kind is not Kind.FOLDER:
                _remove(os.unlink if kind is Kind.ENTRY else os.rmdir, name, parent)
    finally:
        os.close(root)
    os.rmdir(folder)


def _remove(call: Callable[..., None], name: str, parent: int) -> None:
    try:
        call(name, dir_fd=parent)
    except PermissionError:
        os.fchmod(parent, stat.S_IRWXU)
        call(name, dir_fd=parent)


def take_powers(folder: Path) -> None:
    """Leave files and folders below `folder`, itself included, to their owner alone: no setuid or setgid bit, nobody else's access.

    Raises OSError.
    """
    root = open_folder(folder)
    try:
        os.fchmod(root, stat.S_IRWXU)
        for kind, parent, name in walk(root):
            if kind is Kind.LEFT:
                os.chmod(name, stat.S_IRWXU, dir_fd=parent)
            elif kind is Kind.ENTRY and stat.S_ISREG(mode := os.lstat(name, dir_fd=parent).st_mode):
                os.chmod(name, mode & stat.S_IRWXU | stat.S_IRUSR | stat.S_IWUSR, dir_fd=parent)
    finally:
        os.close(root)


def change_owner(path: Path, uid: int) -> None:
    """Give a file, or a folder with all that is in it, to a user and the group of the same number. Raises OSError."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.lchown(path, uid, uid)
        return
    root = open_folder(path)
    try:
        os.fchown(root, uid, uid)
        for kind, parent, name in walk(root):
            if kind is not Kind.FOLDER:
                os.chown(name, uid, uid, dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(root)


def is_open_to_others(folder: Path) -> bool:
    """Whether every user may read all files of a folder. Raises OSError."""
    root = open_folder(folder, forced=False)
    try:
        closed = not os.fstat(root).st_mode & stat.S_IXOTH
        for kind, parent, name in walk(root, forced=False):
            mode = os.lstat(name, dir_fd=parent).st_mode
            needed = stat.S_IROTH | stat.S_IXOTH if kind is not Kind.ENTRY else 0 if stat.S_ISLNK(mode) else stat.S_IROTH
            closed |= mode & needed != needed
        return not closed
    finally:
        os.close(root)


class TreeSize(NamedTuple):
    num_bytes: int
    """Blocks in use; a file with several names counts once."""
    num_entries: int


def measure(folder: Path, max_entries: int) -> TreeSize:
    """Disk in use below `folder`, while others may be writing to it; stops counting one past `max_entries`.

    Raises FolderMoved when folders are moved about while it looks.
    """
    num_bytes = num_entries = 0
    counted: set[int] = set()

    def names(inner: int) -> list[tuple[str, bool]]:
        return listing(inner, max_entries + 1 - num_entries)

    with contextlib.suppress(FileNotFoundError):
        root = open_folder(folder)
        try:
            for kind, parent, name in walk(root, names):
                if kind is Kind.LEFT:
                    continue
                if num_entries > max_entries:
                    break
                num_entries += 1
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(name, dir_fd=parent)
                    if found.st_nlink > 1 and kind is Kind.ENTRY:
                        if found.st_ino in counted:
                            continue
                        counted.add(found.st_ino)
                    num_bytes += found.st_blocks * 512
        finally:
            os.close(root)
    return TreeSize(num_bytes, num_entries)
