"""Where symbolic links of a folder lead, by the rules that the kernel will follow them by: inside it, out of it, or nowhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

MAX_LINKS: Final = 40
"""Linux follows no more in one path (MAXSYMLINKS)."""
MAX_STEPS: Final = 2_000_000
"""Parts of paths that are looked at for all links of a folder together; a workspace of 20,000 ordinary links takes a tenth."""
NOT_A_LINK: Final = (errno.EINVAL, errno.ENOENT, errno.ENOTDIR)


class Lead(Enum):
    INSIDE = "inside"
    OUTSIDE = "outside"
    LOOP = "loop"
    """More links on the way than the kernel follows."""


class LinkRule(msgspec.Struct, frozen=True):
    """What counts as inside beside the folder itself."""

    roots: tuple[str, ...] = ()
    """Absolute names that the folder will have."""
    visible: tuple[str, ...] = ()
    """Absolute folders that hold the same for whoever made the link and for whoever follows it."""


STRICT: Final = LinkRule()
"""Every absolute link leads outside."""


class LinkResolver:
    """Follows the links of one folder, open as `root`, without leaving it."""

    def __init__(self, root: int, rule: LinkRule):
        self._root = root
        self._rule = rule
        self._steps = MAX_STEPS

    def leads(self, folder: Sequence[str], target: str) -> Lead:
        """Where a link to `target` in the folder with these path parts leads. What cannot be told leads outside."""
        at = [] if target.startswith("/") else list(folder)
        is_inside = not target.startswith("/")
        pending, num_links = target.split("/")[::-1], 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            self._steps -= 1 + len(at)
            if self._steps < 0 or (part == ".." and at and not is_inside):
                return Lead.OUTSIDE
            if part == "..":
                is_inside = is_inside and bool(at)
                at = at[:-1]
                continue
            at.append(part)
            if not is_inside:
                if "/" + "/".join(at) in self._rule.roots:
                    at, is_inside = [], True
                continue
            try:
                link = self._link(at)
            except OSError:
                return Lead.OUTSIDE
            if link is not None:
                num_links += 1
                if num_links > MAX_LINKS:
                    return Lead.LOOP
                at.pop()
                pending += link.split("/")[::-1]
                if link.startswith("/"):
                    at, is_inside = [], False
        return Lead.INSIDE if is_inside or self._is_visible(at) else Lead.OUTSIDE

    def _link(self, at: Sequence[str]) -> str | None:
        """Target of the link with these path parts; None when it is not one. Raises OSError when that cannot be seen."""
        try:
            return os.readlink("/".join(at), dir_fd=self._root)
        except OSError as error:
            if error.errno in NOT_A_LINK:
                return None
            raise

    def _is_visible(self, at: Sequence[str]) -> bool:
        path = "/" + "/".join(at)
        return any(path == folder or path.startswith(f"{folder}/") for folder in self._rule.visible)
