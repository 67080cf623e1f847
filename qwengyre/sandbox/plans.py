"""What the launcher tells processes in and around sandboxes, as JSON. For the types alone: at run time those processes import nothing of it."""

from __future__ import annotations

from typing import Any, TypedDict

Message = dict[str, Any]
"""Between the launcher, the zygote and its relays: its keys say what it is, in `zygote.py`."""


class RelayPlan(TypedDict):
    port: int
    """On the loopback of the sandbox."""
    socket: str
    """Of the gateway, to relay to."""


class BoundsPlan(TypedDict):
    cgroup_fds: list[int]
    """`cgroup.procs` of the cgroups to join."""
    rlimits: dict[str, int]


class ColdPlan(BoundsPlan):
    """For `inside.py`."""

    cwd: str
    stdin: str
    harness: int
    """Descriptor of a `ProgramPlan`."""
    lifeline: int
    """Descriptor; -1 for none."""
    subreaper: bool
    relay: RelayPlan | None
    replaces: bool
    """The program is process 1 itself."""


class ProgramPlan(TypedDict):
    command: list[str]
    env: dict[str, str]


class WarmPlan(ProgramPlan):
    """For a process that the zygote forks."""

    cwd: str
    stdin: str
    rlimits: dict[str, int]
    relay: RelayPlan


class RootPlan(TypedDict):
    """For `overlay.py`."""

    root: str
    place: str
    uid: int | None
    """Of the user of the sandbox, for root; None for a normal user."""
    num_bytes: int
    num_files: int
