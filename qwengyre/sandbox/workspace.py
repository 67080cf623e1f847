"""The folder that a harness works in: made from the task, digested and copied for the evaluator, kept after its end.

What a harness leaves is hostile input: no link of it is followed, and none that leaves it is copied; special files are never opened;
holes are not read; sizes are bounded, depth is not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from qwengyre.core.errors import SandboxError, WorkspaceRefused
from qwengyre.images.image import Image
from qwengyre.images.rooted import open_in
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.limits import MIB, OVERSHOOT
from qwengyre.sandbox.links import STRICT, Lead, LinkResolver, LinkRule
from qwengyre.sandbox.task import NOT_COPIED, Task
from qwengyre.sandbox.tree import FOLDER, Kind, Visit, listing, open_file, open_folder, remove_tree, take_powers, walk

CHUNK_BYTES: Final = 64 * 1024
"""What is digested, and left out when it is all zeros, as one piece."""
ZEROS: Final = bytes(CHUNK_BYTES)
NO_BOUND: Final = 1 << 62
STAGED_LINKS: Final = ".names"
"""Beside a copy that is being made: the files in it that have several names."""


def prepare_workspace(task: Task, target: Path, limits: LimitsConfig | None = None) -> None:
    """Make `target` with what the task's image has in its WORKDIR, and a copy of the task's `environment/` over that.

    What an image is built of is not copied. Raises SandboxError when it is over the limits that a harness in it would have, and OSError.
    """
    target.mkdir(parents=True)
    budget, image = _Budget(limits, 1), task.image
    if image is not None and image.workdir != "/":
        with _named(f"{image.workdir} of image {image.name}"), _opened(lambda: _workdir_of(image)) as root:
            if root is not None:
                _Copy(root, target, budget, None).into(forced=False)
    if image is None or not (task.wanted_image and task.wanted_image.context):
        with _named(str(task.environment)), _opened(lambda: open_folder(task.environment, forced=False)) as root:
            if root is not None:
                _Copy(root, target, budget, STRICT, left_out=NOT_COPIED).into(forced=False)


def _workdir_of(image: Image) -> int:
    root = open_folder(image.root, forced=False)
    try:
        return open_in(root, image.workdir, FOLDER & ~os.O_NOFOLLOW)
    finally:
        os.close(root)


@contextlib.contextmanager
def _opened(opener: Callable[[], int]) -> Iterator[int | None]:
    """A descriptor of a folder, None if there is none."""
    try:
        root = opener()
    except FileNotFoundError:
        yield None
        return
    try:
        yield root
    finally:
        os.close(root)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except WorkspaceRefused:
        raise SandboxError(f"{what} is over the limits of a workspace: raise limits.disk_mb or limits.files") from None


def copy_workspace(source: Path, target: Path, limits: LimitsConfig, links: LinkRule = STRICT) -> str:
    """Copy what a harness left to `target`, which must not exist, and return the digest of what was copied.

    The digest covers names, kinds, executable bits, link targets and contents, in sorted order. Sockets, pipes, devices and links that
    leave the workspace are left out. Raises WorkspaceRefused when it is too large to be scored, and OSError.
    """
    root = open_folder(source)
    try:
        return _Copy(root, target, _Budget(limits, OVERSHOOT), links).run()
    finally:
        os.close(root)


def keep_copy(source: Path, target: Path) -> None:
    """Copy what a harness left to `target`, which must not exist, for people to look at: without powers and special files, links as they are.

    Raises OSError.
    """
    root = open_folder(source)
    try:
        _Copy(root, target, _Budget(None, 1), None).run()
    finally:
        os.close(root)
    take_powers(target)


def move_tree(source: Path, target: Path) -> None:
    """Move what a harness left, without its powers, also to another file system (special files are left out then). Raises OSError."""
    take_powers(source)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        keep_copy(source, target)
        remove_tree(source)


class _Budget:
    """What may still be copied; no bound without limits."""

    def __init__(self, limits: LimitsConfig | None, times: int):
        self.num_bytes = NO_BOUND if limits is None else limits.disk_mb * MIB * times
        self.num_files = NO_BOUND if limits is None else limits.files * times

    def spend(self, *, num_bytes: int = 0, num_files: int = 0) -> None:
        self.num_bytes -= num_bytes
        self.num_files -= num_files
        if self.num_bytes < 0 or self.num_files < 0:
            raise WorkspaceRefused("the workspace is far beyond its limits (limits.disk_mb, limits.files)")


class _Copy:
    """One copy of a folder that is open as `source`. `links` None keeps every link as it is."""

    def __init__(
        self, source: int, target: Path, budget: _Budget, links: LinkRule | None, *, left_out: frozenset[str] = frozenset()
    ):
        self._source, self._target, self._budget, self._left_out = source, target, budget, left_out
        self._resolver = LinkResolver(source, links) if links is not None else None
        self._digest = hashlib.blake2b(digest_size=16)
        self._path: list[str] = []
        self._into = -1
        """The folder of the copy that the walk is in."""
        self._named: dict[int, bytes] = {}
        """Inode -> digest of the contents, of files with several names."""
        self._staged = target.with_name(target.name + STAGED_LINKS)

    def run(self, *, forced: bool = True) -> str:
        """Make the target, which must not exist, with a copy in it; return its digest."""
        os.mkdir(self._target)
        return self.into(forced=forced)

    def into(self, *, forced: bool) -> str:
        """Copy into the target. What it has under the name of a folder must be one; other things of its own make room."""
        self._into = os.open(self._target, FOLDER)
        try:
            for visit in walk(self._source, self._names, forced=forced):
                if visit.kind is Kind.ENTRY:
                    self._copy_entry(visit, forced=forced)
                elif visit.kind is Kind.FOLDER:
                    self._enter(visit.name)
                else:
                    self._leave()
        finally:
            os.close(self._into)
            if self._named:
                remove_tree(self._staged)
        return self._digest.hexdigest()

    def _names(self, folder: int) -> list[tuple[str, bool]]:
        found = listing(folder, self._budget.num_files + 1)
        return sorted(entry for entry in found if self._path or entry[0] not in self._left_out)

    def _enter(self, name: str) -> None:
        self._budget.spend(num_files=1)
        self._note(b"d", name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._into)
        self._go_to(name)
        self._path.append(name)

    def _leave(self) -> None:
        self._note(b"e", "")
        self._go_to("..")
        self._path.pop()

    def _go_to(self, name: str) -> None:
        inner = os.open(name, FOLDER, dir_fd=self._into)
        os.close(self._into)
        self._into = inner

    def _note(self, kind: bytes, name: str, content: bytes = b"") -> None:
        """Add one entry to the digest; lengths are part of it, so that no two trees look alike."""
        encoded = os.fsencode(name)
        self._digest.update(b"%s %d %d " % (kind, len(encoded), len(content)) + encoded + content)

    def _copy_entry(self, visit: Visit, *, forced: bool) -> None:
        _, parent, name = visit
        mode = os.lstat(name, dir_fd=parent).st_mode
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._into)
        if stat.S_ISLNK(mode):
            target = os.readlink(name, dir_fd=parent)
            if self._resolver is None or self._resolver.leads(self._path, target) is not Lead.OUTSIDE:
                self._budget.spend(num_files=1)
                self._note(b"l", name, os.fsencode(target))
                os.symlink(target, name, dir_fd=self._into)
        elif stat.S_ISREG(mode):
            self._budget.spend(num_files=1)
            file = open_file(name, parent, forced=forced)
            try:
                self._copy_file(file, name)
            finally:
                os.close(file)

    def _copy_file(self, file: int, name: str) -> None:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return
        content, staged = self._named.get(found.st_ino), self._staged / str(found.st_ino)
        if content is not None:
            os.link(staged, name, dst_dir_fd=self._into)
        else:
            content = self._copy_content(file, name, found)
            if found.st_nlink > 1:
                self._staged.mkdir(exist_ok=True)
                self._named[found.st_ino] = content
                os.link(name, staged, src_dir_fd=self._into)
        self._note(b"x" if found.st_mode & stat.S_IXUSR else b"f", name, content)

    def _copy_content(self, file: int, name: str, found: os.stat_result) -> bytes:
        """Copy the contents, holes as holes; return their digest, which is the same wherever the holes are."""
        mode = found.st_mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR
        copy = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode, dir_fd=self._into)
        digest = hashlib.blake2b(b"%d " % found.st_size, digest_size=16)
        try:
            for offset, data in _pieces(file, found.st_size):
                self._budget.spend(num_bytes=len(data))
                if data != ZEROS[: len(data)]:
                    digest.update(b"%d " % offset + data)
                    os.pwrite(copy, data, offset)
            os.ftruncate(copy, found.st_size)
        finally:
            os.close(copy)
        return digest.digest()


def _pieces(file: int, num_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Aligned pieces of an open file of this size, with their offsets; those that lie in a hole are passed over."""
    offset = 0
    while offset < num_bytes:
        try:
            start = os.lseek(file, offset, os.SEEK_DATA)
            end = min(os.lseek(file, start, os.SEEK_HOLE), num_bytes)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data after this offset
                raise
            return
        offset = start - start % CHUNK_BYTES
        while offset < end:
            data = os.pread(file, min(CHUNK_BYTES, num_bytes - offset), offset)
            if not data:
                return
            yield offset, data
            offset += CHUNK_BYTES
