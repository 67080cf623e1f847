"""What one sandbox has of the machine, and gives back at its end: a cgroup, an identity, a pipe for what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from qwengyre.sandbox.isolation import Identity
from qwengyre.sandbox.limits import Cgroup
from qwengyre.sandbox.tree import change_owner


class Room(msgspec.Struct, frozen=True):
    """Made by `SandboxHost.room`. Descriptors in it are closed by it."""

    cgroup: Cgroup
    cgroup_fds: Sequence[int]
    """Descriptors that a process joins the cgroup by, writing `0`."""
    identity: Identity | None
    """None: the user of this process, without its powers."""
    output: int
    """Takes standard output and standard error."""

    @property
    def identity_fds(self) -> tuple[int, ...]:
        return () if self.identity is None else (self.identity.outer, self.identity.inner)

    def own(self, *paths: Path) -> None:
        """Make these files and folders, with all that is in them, the sandbox's own. Nothing may be changing them. Raises OSError."""
        if self.identity is not None:
            for path in paths:
                change_owner(path, self.identity.uid)
