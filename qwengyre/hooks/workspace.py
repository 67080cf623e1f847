"""The workspace that a harness left, for a reward hook: what a policy wrote, read so that no link, pipe or size can do harm."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import Final

from qwengyre.sandbox.tree import FOLDER, Kind, open_file, open_folder, walk

MAX_FILE_BYTES: Final = 16 << 20
"""More than any text that a rule looks at, little enough for many rewards at once."""
MAX_FILES: Final = 100_000
"""Names that a list may have: far above a repository, far below what fills the controller's memory."""


class LeftWorkspace:
    """Read-only. `folder` is the path itself: whoever opens it by other means follows the links that the policy made."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def files(self) -> list[str]:
        """Paths of all regular files, sorted, relative to the workspace; links are left out. Raises ValueError when there are too many."""
        found: list[str] = []
        root = open_folder(self.folder)
        try:
            inside: list[str] = []
            for kind, parent, name in walk(root):
                if kind is Kind.FOLDER:
                    inside.append(name)
                elif kind is Kind.LEFT:
                    inside.pop()
                elif stat.S_ISREG(os.lstat(name, dir_fd=parent).st_mode):
                    found.append("/".join((*inside, name)))
                    if len(found) > MAX_FILES:
                        raise ValueError(f"the workspace has more than {MAX_FILES:,} files")
        finally:
            os.close(root)
        return sorted(found)

    def has(self, path: str) -> bool:
        """Whether a regular file is there, reached without a link."""
        try:
            os.close(self._open(path))
        except (OSError, ValueError):
            return False
        return True

    def read_bytes(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Raises FileNotFoundError, OSError for a link on the way, ValueError for what is no regular file below, or larger."""
        with os.fdopen(self._open(path), "rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes:,} bytes")
        return content

    def read_text(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> str:
        """As `read_bytes`, as text; bytes that are not UTF-8 become replacement characters."""
        return self.read_bytes(path, max_bytes).decode("utf-8", errors="replace")

    def _open(self, path: str) -> int:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise ValueError(f"{path!r} is no path inside of the workspace")
        parent = open_folder(self.folder)
        try:
            for name in parts[:-1]:
                inner = os.open(name, FOLDER, dir_fd=parent)
                os.close(parent)
                parent = inner
            found = open_file(parts[-1], parent)
        finally:
            os.close(parent)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            os.close(found)
            raise ValueError(f"{path} is no regular file")
        return found
