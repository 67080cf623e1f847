"""Make pairs of user namespaces for sandboxes of root: `python -I -S namespaces.py CHANNEL UID GID ID...`.

Sends one message for each pair over CHANNEL (a Unix socket), with a descriptor of both. The outer one is for bubblewrap while it makes a
sandbox: it maps root, so that bubblewrap reaches what root may read. The inner one is for the sandbox: it knows one user, and can make no
more namespaces.

    host    outer    inner
    ID      1000     UID      the user of the sandbox; GID its group
    ID+1    0                 nobody: devpts wants a root
    0       65533             root, without being root of this namespace: leaving that id must not cost bubblewrap its rights
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys

CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4
USER, OUTER_ROOT = 1000, 65533
IDS_OF_A_PAIR = 2

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def make_pair(uid: int, shown: list[str]) -> tuple[int, int]:
    """Descriptors of the outer and the inner namespace for one user, who has the numbers `shown` in the inner one.

    Raises OSError where this root may not make them.
    """
    (to_child, ours), (theirs, from_child) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            os.close(theirs)
            become_inner(to_child, from_child, shown)
        except OSError as error:
            os.write(from_child, b"!" + str(error).encode())
        finally:
            os._exit(1)
    os.close(to_child)
    os.close(from_child)
    try:
        await_child(theirs)
        ids = f"0 {uid + 1} 1\n{USER} {uid} 1\n{OUTER_ROOT} 0 1\n"
        for name in ("uid_map", "gid_map"):
            write(f"/proc/{child}/{name}", ids)
        outer = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        os.write(ours, b"1")
        await_child(theirs)
        return outer, os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)


def await_child(reader: int) -> None:
    said = os.read(reader, 500).decode()
    if said != "1":
        raise OSError(said[1:] or "the process that makes a user namespace died")


def become_inner(reader: int, writer: int, shown: list[str]) -> None:
    """In the child: make the outer namespace, have it mapped, become its user, make the inner one."""
    check(libc.unshare(CLONE_NEWUSER), "unshare")
    os.write(writer, b"1")
    os.read(reader, 1)
    with contextlib.suppress(OSError):  # read-only in some containers; the seccomp filter of a sandbox refuses more by itself
        write("/proc/sys/user/max_user_namespaces", "1")
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    check(libc.unshare(CLONE_NEWUSER), "unshare")
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    write("/proc/self/setgroups", "deny")
    for name, number in zip(("uid_map", "gid_map"), shown, strict=True):
        write(f"/proc/self/{name}", f"{number} {USER} 1\n")
    os.write(writer, b"1")
    os.read(reader, 1)


def main(argv: list[str]) -> int:
    channel = socket.socket(fileno=int(argv[1]))
    try:
        for uid in argv[4:]:
            pair = make_pair(int(uid), argv[2:4])
            socket.send_fds(channel, [b"1"], pair)
            for fd in pair:
                os.close(fd)
    except OSError as error:
        channel.send(b"!" + str(error).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
