"""Mount file systems of a given size in a mount namespace of its own: `python -I -S mounter.py CHANNEL`.

Root needs no more; a normal user gets a user namespace around it, in which he is himself. The first message over CHANNEL (a Unix socket)
says `1` once both are made. Then each request is answered by `1`, a mount with a descriptor of its top folder, or by `!` and a reason.
Nothing is mounted for the machine to see, and the kernel takes everything back when this process and the sandboxes have ended, however
they end.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys

TYPE_CHECKING = False  # of `typing`, which is not imported: a start waits for it
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_SLAVE = 2, 4, 16384, 1 << 19
MNT_DETACH = 2
PR_SET_DUMPABLE = 4
REQUEST_BYTES = 16384

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def isolate() -> None:
    """Enter the namespaces. Raises OSError where this user may make none."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWNS | (0 if uid == 0 else CLONE_NEWUSER)), "unshare")
    if uid != 0:
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # so that the launcher's children may join
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1\n")
        write("/proc/self/gid_map", f"{gid} {gid} 1\n")
    check(libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None), "mount")


def mount(path: str, num_bytes: int, num_files: int) -> int:
    """Mount at `path`, an empty folder; a descriptor of what is there then. One inode is the top folder's own."""
    options = f"size={num_bytes},nr_inodes={num_files + 1},mode=0755"
    check(libc.mount(b"qwengyre", os.fsencode(path), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()), f"mount {path}")
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def answer(channel: socket.socket, request: dict[str, Any]) -> None:
    if "unmount" in request:
        check(libc.umount2(os.fsencode(request["unmount"]), MNT_DETACH), f"umount {request['unmount']}")
        channel.send(b"1")
        return
    folder = mount(request["mount"], request["num_bytes"], request["num_files"])
    try:
        socket.send_fds(channel, [b"1"], [folder])
    finally:
        os.close(folder)


def main(argv: list[str]) -> int:
    channel = socket.socket(fileno=int(argv[1]))
    try:
        isolate()
    except OSError as error:
        channel.send(b"!" + str(error).encode())
        return 1
    channel.send(b"1")
    while data := channel.recv(REQUEST_BYTES):
        try:
            answer(channel, json.loads(data))
        except OSError as error:
            channel.send(b"!" + str(error).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
