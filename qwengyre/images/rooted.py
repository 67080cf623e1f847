"""Paths inside of an image: its links are followed as they will be when the image is the root, and never out of it."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

OPENAT2: Final = 437
"""The same number on x86-64 and on 64-bit ARM; Linux 5.6."""
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
TRIES: Final = 100
"""The kernel gives up (EAGAIN) when something below the root is moved while it looks; it says to try again."""

libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in(root: int, path: str, flags: int) -> int:
    """A descriptor of `path` in the folder that is open as `root`, which `/` and `..` do not leave. Raises OSError."""
    how = _How(flags | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    for _ in range(TRIES):
        found = libc.syscall(OPENAT2, root, os.fsencode(path or "."), ctypes.byref(how), ctypes.sizeof(how))
        if found >= 0:
            return int(found)
        if ctypes.get_errno() != errno.EAGAIN:
            break
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


def read_in(root: int, path: str, max_bytes: int) -> bytes:
    """What a file in the image holds, at most so much of it. Raises OSError."""
    fd = open_in(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return os.pread(fd, max_bytes, 0)
    finally:
        os.close(fd)
