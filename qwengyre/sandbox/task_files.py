"""The files of one task folder, looked at as somebody else's: no link is followed, no pipe opened, every size and number bounded."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from qwengyre.core.text import one_line
from qwengyre.sandbox.links import STRICT, Lead, LinkResolver
from qwengyre.sandbox.tree import Kind, Visit, listing, open_file, open_folder, walk

MIB: Final = 1024 * 1024
MAX_INSTRUCTION_BYTES: Final = 100_000
"""One argument of a Linux command may hold 128 KiB."""
MAX_TEXT_BYTES: Final = 256 * 1024
"""Of a task.toml, of tests/test.sh and of a Dockerfile; the largest of Terminal-Bench has 20 KiB."""
MAX_FOLDER_BYTES: Final = 1024 * MIB
"""Of environment/, which every execution copies twice, and of tests/. Holes count: a file of this size is read as such."""
MAX_FOLDER_ENTRIES: Final = 100_000
MAX_FOLDER_DEPTH: Final = 100
SHEBANG_BYTES: Final = 256
"""Linux reads no more of a script's first line (BINPRM_BUF_SIZE)."""
UTF8_MARK: Final = b"\xef\xbb\xbf"
SCANNED_BYTES: Final = 16 * MIB
"""Of all files of tests/ together, to find one that mentions a reward."""
REWARD_HINT: Final = "write reward.txt or reward.json into ${VERIFIER_DIR:-/logs/verifier}"
NEEDS_REWARD: Final = "it writes reward.txt or reward.json into the verifier log folder"


class Problem(msgspec.Struct, frozen=True, order=True):
    """One thing that is wrong with a task. `line` is 0 when the whole file or folder is meant."""

    file: str
    line: int
    severity: Literal["error", "warning"]
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return one_line(f"{where}: {self.severity}: {self.message}")


class Problems:
    """What is wrong with one task folder, as it is found."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def error(self, path: Path, message: str, line: int = 0) -> None:
        self.found.append(Problem(str(path), line, "error", one_line(message)))

    @property
    def num_errors(self) -> int:
        return sum(problem.severity == "error" for problem in self.found)

    def warning(self, path: Path, message: str, line: int = 0) -> None:
        self.found.append(Problem(str(path), line, "warning", one_line(message)))


class Unreadable(Exception):
    """A file that cannot be used; `str(error)` says why."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file of a task folder. Raises FileNotFoundError, and Unreadable for whatever else is there."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = open_file(path.name, folder, forced=False)
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        is_link = path.is_symlink()
        what = "a link: a task's own files must lie in its folder" if is_link else f"cannot be read: {error.strerror}"
        raise Unreadable(what) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable("not a regular file")
        if found.st_size > max_bytes:
            raise Unreadable(f"{found.st_size:,} bytes; at most {max_bytes:,}")
        return os.pread(file, max_bytes, 0)
    finally:
        os.close(file)


def read_instruction(path: Path, problems: Problems) -> str:
    """What the harness is told; empty when it cannot be."""
    try:
        data = read_file(path, MAX_INSTRUCTION_BYTES)
    except FileNotFoundError:
        problems.error(path, "missing: it holds what the harness is told")
        return ""
    except Unreadable as error:
        fit = " fit on a command line: move details to environment/" if "at most" in str(error) else ""
        problems.error(path, f"{error}{fit}")
        return ""
    if b"\0" in data:
        problems.error(path, "holds a NUL byte", line_at(data, data.index(b"\0")))
        return ""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.error(path, f"not UTF-8 at byte {error.start}", line_at(data, error.start))
        return ""
    if not text.strip():
        problems.error(path, "empty: it holds what the harness is told")
    return text


def line_at(data: bytes, offset: int) -> int:
    return data[:offset].count(b"\n") + 1


class FolderSize(NamedTuple):
    """What a copy of a folder takes."""

    num_bytes: int
    num_entries: int


def check_environment(folder: Path, problems: Problems) -> FolderSize:
    """Everything below `environment/` can be copied, and leads nowhere else."""
    root = _open(folder, problems, "its files are copied into the workspace")
    if root < 0:
        return FolderSize(0, 0)
    try:
        return _FolderCheck(root, folder, problems, "the workspace").run()
    finally:
        os.close(root)


def check_tests(folder: Path, problems: Problems) -> None:
    """`tests/test.sh` can be run by bash in a sandbox that has nothing else of the task, and writes a reward."""
    script = folder / "test.sh"
    root = _open(folder, problems, "its test.sh scores the workspace")
    if root < 0:
        if not os.path.lexists(folder):
            problems.error(script, f"missing: {NEEDS_REWARD}")
        return
    try:
        num_before = problems.num_errors
        _FolderCheck(root, folder, problems, "the evaluator").run()
        if problems.num_errors == num_before:
            _check_script(script, problems)
        if problems.num_errors == num_before and not _mentions_reward(root):
            problems.warning(script, f"no file of tests/ mentions a reward file: {REWARD_HINT}")
    finally:
        os.close(root)


def _open(folder: Path, problems: Problems, purpose: str) -> int:
    """A descriptor of one of the task's own folders; -1 where there is none, which is said unless it is missing."""
    try:
        return open_folder(folder, forced=False)
    except FileNotFoundError:
        return -1
    except OSError as error:
        if folder.is_symlink():
            problems.error(folder, "a link: a task's own files must lie in its folder")
        elif not folder.is_dir():
            problems.error(folder, f"must be a folder: {purpose}")
        else:
            problems.error(folder, f"cannot be read: {error.strerror}")
        return -1


class _FolderCheck:
    """Links, special files, sizes and depth of one folder of a task. Ends at the first bound that is passed."""

    def __init__(self, root: int, folder: Path, problems: Problems, who: str):
        self._root, self._folder, self._problems, self._who = root, folder, problems, who
        self._resolver = LinkResolver(root, STRICT)
        self._parts: list[str] = []
        self._num_bytes = self._num_entries = 0
        self._names: dict[int, int] = {}
        """Inode of a file with several names -> how many of them are not below this folder."""

    def run(self) -> FolderSize:
        try:
            for visit in walk(self._root, self._listing, forced=False):
                if visit.kind is Kind.LEFT:
                    self._parts.pop()
                elif self._is_over(visit):
                    break
                elif visit.kind is Kind.ENTRY:
                    self._check_entry(visit)
        except OSError as error:
            self._problems.error(self._folder.joinpath(*self._parts), f"cannot be read: {error.strerror}")
        if num_others := sum(left > 0 for left in self._names.values()):
            message = f"{num_others} files have other names elsewhere (hard links): whoever writes there changes this task"
            self._problems.warning(self._folder, message)
        return FolderSize(self._num_bytes, self._num_entries)

    def _listing(self, folder: int) -> list[tuple[str, bool]]:
        return sorted(listing(folder, MAX_FOLDER_ENTRIES + 1 - self._num_entries))

    def _is_over(self, visit: Visit) -> bool:
        """Count one entry; say which bound is passed."""
        self._num_entries += 1
        if visit.kind is Kind.FOLDER:
            self._parts.append(visit.name)
        else:
            self._num_bytes += os.lstat(visit.name, dir_fd=visit.parent).st_size
        if self._num_entries > MAX_FOLDER_ENTRIES:
            self._problems.error(self._folder, f"more than {MAX_FOLDER_ENTRIES:,} files and folders")
        elif len(self._parts) > MAX_FOLDER_DEPTH:
            self._problems.error(self._folder / self._parts[0], f"more than {MAX_FOLDER_DEPTH} folders deep")
        elif self._num_bytes > MAX_FOLDER_BYTES:
            message = f"more than {MAX_FOLDER_BYTES // MIB:,} MiB: leave large data outside, and name it in harness.readable"
            self._problems.error(self._folder, message)
        else:
            return False
        return True

    def _check_entry(self, visit: Visit) -> None:
        path = self._folder.joinpath(*self._parts, visit.name)
        found = os.lstat(visit.name, dir_fd=visit.parent)
        if stat.S_ISLNK(found.st_mode):
            lead = self._resolver.leads(self._parts, os.readlink(visit.name, dir_fd=visit.parent))
            if lead is Lead.OUTSIDE:
                self._problems.error(path, f"this link leads out of {self._folder.name}/, which {self._who} does not see")
            elif lead is Lead.LOOP:
                self._problems.warning(path, "this link leads to itself: nothing can be read through it")
        elif not stat.S_ISREG(found.st_mode):
            self._problems.error(path, "neither a file, a folder nor a link: it cannot be copied")
        elif (found.st_mode & 0o111 or visit.name.endswith(".sh")) and (first := _windows_line(visit)):
            if found.st_mode & 0o111 and first.startswith(b"#!"):
                message = "its first line ends in a carriage return (Windows), so the system will not find its interpreter"
                self._problems.warning(path, message, 1)
            elif visit.name.endswith(".sh") and path != self._folder / "test.sh":  # which is looked at whole
                message = "its first line ends in a carriage return (Windows), which a shell takes for part of the command"
                self._problems.warning(path, message, 1)
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            self._names[found.st_ino] = self._names.get(found.st_ino, found.st_nlink) - 1


def _windows_line(visit: Visit) -> bytes:
    """The first line of a file whose lines end as on Windows; else nothing."""
    file = open_file(visit.name, visit.parent, forced=False)
    try:
        first, is_more, _ = os.pread(file, SHEBANG_BYTES, 0).partition(b"\n")
    finally:
        os.close(file)
    return first if first.endswith(b"\r") and is_more else b""


def _check_script(path: Path, problems: Problems) -> None:
    """What bash would stumble over in its first lines."""
    try:
        data = _read_script(path)
    except FileNotFoundError:
        problems.error(path, f"missing: {NEEDS_REWARD}")
        return
    except Unreadable as error:
        problems.error(path, str(error))
        return
    if not data.strip():
        problems.error(path, f"empty: {NEEDS_REWARD}")
    elif b"\0" in data:
        problems.error(path, "holds a NUL byte, so bash will not run it: save it as UTF-8", line_at(data, data.index(b"\0")))
    elif data.startswith(UTF8_MARK):
        problems.error(path, "begins with a byte order mark, which bash takes for part of its first command: save it without", 1)
    elif b"\r\n" in data or (b"\r" in data and b"\n" not in data):
        message = "ends in a carriage return (Windows), which bash takes for part of the command: sed -i 's/\\r$//' test.sh"
        problems.error(path, f"this line {message}", line_at(data, data.index(b"\r")))


def _read_script(path: Path) -> bytes:
    """Contents of tests/test.sh, which may be a link to another file of tests/."""
    if path.is_symlink():
        try:
            path = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise Unreadable("this link leads to no file") from None
    return read_file(path, MAX_TEXT_BYTES)


def _mentions_reward(root: int) -> bool:
    """Whether any file below the folder names a reward; a tests/ too large to search counts as one that does."""
    left = SCANNED_BYTES
    for kind, parent, name in walk(root, forced=False):
        if kind is not Kind.ENTRY or not stat.S_ISREG(os.lstat(name, dir_fd=parent).st_mode):
            continue
        file = open_file(name, parent, forced=False)
        try:
            data = os.pread(file, left, 0)
        finally:
            os.close(file)
        left -= len(data)
        if b"reward" in data or left <= 0:
            return True
    return False
