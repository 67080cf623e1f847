"""Leave the groups and the session keyring of the calling thread. Standard library only: the zygote imports it."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

KEYCTL: Final = {"x86_64": 250, "aarch64": 219}
SETGROUPS: Final = {"x86_64": 116, "aarch64": 159}
"""Numbers of system calls: the functions of libc would change every thread, or are not in it."""
JOIN_SESSION_KEYRING: Final = 1


def leave_groups() -> None:
    """Leave all supplementary groups, if this thread is root's. Raises OSError."""
    if os.geteuid() == 0 and _call(SETGROUPS, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "setgroups")


def join_new_session_keyring() -> None:
    """Leave the session keyring of this thread for an empty one. Where keyrings are forbidden there is none to leave."""
    _call(KEYCTL, JOIN_SESSION_KEYRING, 0)


def _call(numbers: dict[str, int], *arguments: int) -> int:
    number = numbers.get(platform.machine())
    if number is None:
        return 0
    result: int = ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, (number, *arguments)))
    return result
