"""Whom a sandbox is, for the machine. For a normal user that user, without any power; for root one of many ids that own nothing.

Each live sandbox of root has an id of its own, so that what the kernel counts by user (processes, watches, pipes, messages in flight)
is counted for it alone, and a file that it leaves behind belongs to nobody. `namespaces.py` makes the user namespaces; a pair is used
again by the next sandbox: nothing of a sandbox stays in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox import namespaces
from qwengyre.sandbox.isolation import SANDBOX_UID, Identity, interpreter
from qwengyre.sandbox.namespaces import IDS_OF_A_PAIR

RANGES: Final = (range(2_000_000_000, 2_000_008_192), range(61_184, 65_280))
"""Above all that users, containers and network directories are given; then, for a root with 65,536 ids, what systemd gives to services
for as long as they run."""
AT_ONCE: Final = 4
"""Pairs made by one start of the program that makes them."""
NO_IDS: Final = (
    "root here has no ids that own nothing ({reason}), and a harness is not started with root's own: run QwenGyre as a normal user "
    "(it needs no root), or give this container more ids (as many as the machine has: no --userns-remap, or a larger range in /etc/subuid)"
)
NOT_MADE: Final = (
    "root here may not make user namespaces for ids that own nothing ({reason}), and a harness is not started with root's own: run "
    "QwenGyre as a normal user (it needs no root), or, in a container, allow root what Docker allows by default (SETUID, SETGID, "
    "SETFCAP) and user namespaces (docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
)


class Shown(NamedTuple):
    """The numbers that a sandbox knows its own user and group by."""

    uid: int = SANDBOX_UID
    gid: int = SANDBOX_UID


AGENT: Final = Shown()


def find_identities() -> Identities | None:
    """Identities for the sandboxes of root; None for a normal user. Raises SandboxError where root has no ids for them."""
    if os.geteuid() != 0:
        return None
    return Identities(unowned_ids(_text("/proc/self/uid_map"), _text("/etc/passwd"), _text("/etc/subuid")))


def unowned_ids(uid_map: str, passwd: str, subuid: str) -> range:
    """The first of RANGES that exists here and of which no user has an id. Texts of the files so named; raises SandboxError."""
    exist = [(int(first), int(first) + int(count)) for first, _, count in (line.split() for line in uid_map.splitlines())]
    users = [int(line.split(":")[2]) for line in passwd.splitlines() if line.count(":") >= 3 and line.split(":")[2].isdigit()]
    taken = [(uid, uid + 1) for uid in users]
    for line in subuid.splitlines():
        first, _, count = line.partition(":")[2].partition(":")
        if first.isdigit() and count.isdigit():
            taken.append((int(first), int(first) + int(count)))
    for ids in RANGES:
        if any(low <= ids.start and ids.stop <= high for low, high in exist) and not any(
            low < ids.stop and ids.start < high for low, high in taken
        ):
            return ids
    raise SandboxError(NO_IDS.format(reason=f"neither {' nor '.join(f'{ids.start} to {ids.stop - 1}' for ids in RANGES)}"))


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace") if os.path.exists(path) else ""


class Identities:
    """A growing pool. Identities are taken for as long as a sandbox lives."""

    def __init__(self, ids: range):
        pairs = len(ids) // IDS_OF_A_PAIR
        start = random.randrange(pairs)
        self._unused = [ids[IDS_OF_A_PAIR * (n % pairs)] for n in range(start, start + pairs)]
        """From anywhere in the range, so that two runs of one machine seldom have the same."""
        self._free: dict[Shown, list[Identity]] = {}
        self._made: list[Identity] = []

    @contextlib.contextmanager
    def taken(self, shown: Shown = AGENT) -> Iterator[Identity]:
        """An identity that no other sandbox has. Raises SandboxError when none can be made."""
        free = self._free.setdefault(shown, [])
        if not free:
            self._make(shown)
        identity = free.pop()
        try:
            yield identity
        finally:
            free.append(identity)

    def _make(self, shown: Shown) -> None:
        first = [self._unused.pop() for _ in range(min(AT_ONCE, len(self._unused)))]
        if not first:
            raise SandboxError(f"{len(self._made)} sandboxes at once are more than this machine has ids for")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [interpreter(), "-I", "-S", namespaces.__file__, str(theirs.fileno()), *map(str, (*shown, *first))]
        with ours:
            with theirs:
                maker = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={}, stdin=subprocess.DEVNULL)
            for uid in first:
                said, fds, _, _ = socket.recv_fds(ours, 1000, 2, socket.MSG_CMSG_CLOEXEC)
                if len(fds) != 2:
                    break
                self._made.append(Identity(uid, *fds))
                self._free[shown].append(self._made[-1])
            maker.wait()
        if not self._free[shown]:
            raise SandboxError(NOT_MADE.format(reason=said[1:].decode(errors="replace") or "it died"))

    def close(self) -> None:
        """Close all descriptors. Every sandbox must have ended."""
        for identity in self._made:
            os.close(identity.outer)
            os.close(identity.inner)
        self._made, self._free = [], {}
