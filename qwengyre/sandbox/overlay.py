"""Give a sandbox an image as its root: `python -I -S overlay.py PLAN PROGRAM...`, outside of the sandbox; PROGRAM is bubblewrap.

In a mount namespace of its own, the image read-only below a layer that is in memory, of a bounded size, and gone with the sandbox:

    place/           tmpfs, mounted here only
      lower          run by root: the image, seen as if its files belonged to the user of this sandbox (an id-mapped mount)
      upper, work    what the sandbox writes
      merged         both: the root of the sandbox

bubblewrap 0.8 to 0.10 cannot mount one itself (0.11: --overlay). It imports a few C modules only: every start on an image waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys

TYPE_CHECKING = False  # of `typing`, which is not imported: a start waits for it
if TYPE_CHECKING:
    from qwengyre.sandbox.plans import RootPlan

MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
"""The same numbers on x86-64 and on 64-bit ARM."""
OPEN_TREE_CLONE, AT_FDCWD, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH = 1, -100, 0x1000, 4
RDONLY, NOSUID, NODEV, IDMAP = 0x1, 0x2, 0x4, 0x100000
PR_SET_PDEATHSIG = 1
NO_IDMAP = (
    "the file system of the store of images cannot show files as another user's, which root's sandboxes need: set sandbox.store to a folder "
    "on ext4, xfs or btrfs (Linux 5.19 or newer), or run QwenGyre as a normal user"
)

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    check(libc.mount(*encoded, flags, None if options is None else os.fsencode(options)), f"mount {kind or target}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def own_namespaces(is_root: bool) -> None:
    """A mount namespace in which this process may mount; nothing that is mounted in it is seen outside."""
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(CLONE_NEWNS | (0 if is_root else CLONE_NEWUSER)), "unshare")
    if not is_root:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def namespace_that_maps(uid: int) -> int:
    """Descriptor of a user namespace in which root is `uid` of the machine."""
    (to_child, ours), (theirs, from_child) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        made = libc.unshare(CLONE_NEWUSER)
        os.write(from_child, b"1" if made == 0 else b"0")
        os.read(to_child, 1)
        os._exit(0)
    try:
        if os.read(theirs, 1) != b"1":
            raise OSError(errno.EPERM, "root may make no user namespace")
        for name in ("uid_map", "gid_map"):
            write(f"/proc/{child}/{name}", f"0 {uid} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.write(ours, b"1")
        os.waitpid(child, 0)
        for fd in (to_child, ours, theirs, from_child):
            os.close(fd)


def mount_as_owned(root: str, target: str, uid: int) -> None:
    """Mount the image at `target`, with all that belongs to root in it belonging to `uid`."""
    userns = namespace_that_maps(uid)
    tree = check(libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(root), OPEN_TREE_CLONE | os.O_CLOEXEC), "open_tree")
    wanted = MountAttributes(IDMAP | RDONLY | NOSUID | NODEV, 0, 0, userns)
    size = ctypes.sizeof(wanted)
    if libc.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(wanted), size) < 0:
        raise OSError(ctypes.get_errno(), NO_IDMAP)
    to = os.fsencode(target)
    check(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, to, MOVE_MOUNT_F_EMPTY_PATH), "move_mount")
    os.close(tree)
    os.close(userns)


def make_root(plan: RootPlan) -> None:
    """Mount the root of the sandbox at `merged` in the plan's place."""
    place, uid = plan["place"], plan["uid"]
    own_namespaces(uid is not None)
    mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['num_bytes']},nr_inodes={plan['num_files']},mode=0755")
    lower, upper, work, merged = (f"{place}/{name}" for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        os.mkdir(folder, 0o755)
    if uid is not None:
        os.chown(upper, uid, uid)
        mount_as_owned(plan["root"], lower, uid)
    else:
        lower = plan["root"]
    options = f"lowerdir={lower},upperdir={upper},workdir={work}{',userxattr' if uid is None else ''}"
    mount("overlay", merged, "overlay", MS_NOSUID | MS_NODEV, options)


def main(argv: list[str]) -> int:
    parent = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    plan = json.loads(argv[1])
    if os.getppid() != parent:
        return 1
    try:
        make_root(plan)
        os.execv(argv[2], argv[2:])
    except OSError as error:
        os.write(2, f"overlay: {error.strerror or error}\n".encode())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
