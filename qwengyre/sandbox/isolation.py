"""What a sandbox can see and do, as arguments of bubblewrap. The only place that says so: cold start, warm start, evaluator.

Inside: /usr and the named folders read-only, /workspace (and /app, as Harbor's images have it), a sized /tmp with HOME, a minimal
/etc and /dev, its own /proc. No /root, no other execution, no run folder, no network interface but its own loopback, no new
privileges, no further user namespace. Everything dies with process 1, and process 1 with its parent.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox.limits import MIB

if TYPE_CHECKING:
    from qwengyre.sandbox.on_image import ImageRoot

WORKSPACE: Final = "/workspace"
HOME: Final = "/tmp/home"
GATEWAY_FOLDER: Final = "/run/qwengyre/gateway"
INSIDE: Final = "/run/qwengyre/inside.py"
INSTRUCTION: Final = "/run/qwengyre/instruction.md"
TESTS: Final = "/tests"
VERIFIER_LOGS: Final = "/logs/verifier"
RELAY_PORT: Final = 8377
SANDBOX_UID: Final = 1000
ETC: Final = [
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "pki",
    "services",
    "protocols",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
]
"""What of /etc programs need and holds nothing of the host's users, network or secrets."""
MISSING_BWRAP: Final = (
    "bubblewrap (bwrap) is not installed, and no harness is started without isolation: install the package `bubblewrap` "
    '(Debian, Ubuntu: apt install bubblewrap), or set isolation = "none" in [harness] if you trust the harness and the policy'
)


EMPTY_IN_PROC: Final = (
    "keys",
    "key-users",
    "kcore",
    "latency_stats",
    "sched_debug",
    "timer_list",
    "timer_stats",
    "acpi",
    "asound",
    "scsi",
)
"""What of /proc tells of the machine, not of the sandbox: Docker's list, and keys that a user may see wherever they are."""
FOR_OTHERS: Final = stat.S_IROTH | stat.S_IXOTH
NO_VARIABLES: Final[Mapping[str, str]] = {}
MIN_BWRAP: Final = (0, 8)
"""The first with --disable-userns and with --size."""


class Mount(msgspec.Struct, frozen=True):
    """A path of the host at a path of the sandbox."""

    source: str
    target: str
    writable: bool = False


class SandboxView(msgspec.Struct, frozen=True):
    """Everything that one sandbox sees beside the base system."""

    mounts: tuple[Mount, ...]
    readable: tuple[str, ...]
    """Host folders, read-only, each where it is."""
    etc: str
    """Host folder with the passwd, group, hosts and nsswitch.conf of sandboxes."""
    scratch_mb: int
    chdir: str = WORKSPACE
    gateway_socket: str = ""
    """Where in the sandbox the relay finds the gateway; empty for sandboxes without one."""
    image: ImageRoot | None = None
    """What it has in place of the system of this machine."""


class Identity(msgspec.Struct, frozen=True):
    """An id of the machine, user and group alike, and the user namespaces that make it the user of a sandbox (`identities.py`)."""

    uid: int
    outer: int
    """Descriptor of the namespace that bubblewrap works in."""
    inner: int
    """Descriptor of the one that the sandbox lives in."""


def find_bwrap() -> str:
    """Path of bubblewrap. Raises SandboxError, saying what to install, when there is none or it is too old."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(MISSING_BWRAP)
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    numbers = re.match(r"bubblewrap (\d+)\.(\d+)", shown)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MIN_BWRAP:
        raise SandboxError(f"{path} is {shown or 'no bubblewrap'}; version 0.8 or newer is needed (Debian 12, Ubuntu 24.04)")
    return path


def interpreter() -> str:
    """The Python that this process runs on, without its virtual environment: it starts a few ms faster."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def interpreter_folders() -> tuple[str, ...]:
    """Folders that Python programs of this environment need to see."""
    return tuple(dict.fromkeys((sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix))))


def write_etc(folder: Path) -> None:
    """Write the files of /etc that every sandbox shares, none of them the host's."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    user = f"agent:x:{SANDBOX_UID}:{SANDBOX_UID}::{HOME}:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
    files = {
        "empty": "",
        "passwd": user,
        "group": f"agent:x:{SANDBOX_UID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    (folder / "nothing").mkdir(exist_ok=True)
    (folder / "nothing").chmod(0o755)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)


def bwrap_arguments(
    bwrap: str, view: SandboxView, env: Mapping[str, str] = NO_VARIABLES, identity: Identity | None = None
) -> list[str]:
    """The command line up to, and without, the program to run, which gets the variables `env` and no others.

    No identity: the user of this process is that of the sandbox too.

    Only `SandboxHost.sandboxed` starts it: bubblewrap runs outside the sandbox, where a variable of a task (LD_PRELOAD) is code and
    everybody can read a command line. It is started without variables and reads the options from a descriptor.
    """
    user = ["--unshare-user", "--disable-userns"]
    if identity is not None:
        user = ["--userns", str(identity.outer), "--userns2", str(identity.inner), "--cap-drop", "ALL"]
    shown = (view.image.user.uid, view.image.user.gid) if view.image and identity is None else (SANDBOX_UID, SANDBOX_UID)
    user += ["--uid", str(shown[0]), "--gid", str(shown[1])]
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    arguments = [bwrap, *user, *namespaces, "--die-with-parent", "--as-pid-1", "--new-session"]
    for name, value in env.items():
        arguments += ["--setenv", name, value]
    arguments += _system(view) if view.image is None else _image_system(view, view.image)
    for mount in sorted(view.mounts, key=lambda mount: mount.target):
        arguments += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
    arguments += ["--dir", "/logs/agent"]
    for target, name in (("/app", WORKSPACE),) if view.image is None else view.image.links:
        arguments += ["--symlink", name.lstrip("/"), target]
    arguments += ["--remount-ro", "/dev"]
    if view.image is None:
        arguments += ["--remount-ro", "/"]
    return [*arguments, "--chdir", view.chdir, "--"]


def _system(view: SandboxView) -> list[str]:
    scratch = str(view.scratch_mb * MIB)
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for name in ETC:
        if os.path.exists(path := f"/etc/{name}"):
            arguments += ["--ro-bind", path, path]
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        arguments += ["--ro-bind", f"{view.etc}/{name}", f"/etc/{name}"]
    arguments += _of_kernel(view)
    arguments += ["--size", scratch, "--tmpfs", "/tmp", "--dir", HOME]
    return arguments + _readable(view)


def _image_system(view: SandboxView, image: ImageRoot) -> list[str]:
    """An image's own files, but for the names of machines; what is written over them is bounded where they are mounted."""
    arguments = ["--bind", image.merged, "/", "--ro-bind", f"{view.etc}/hosts", "/etc/hosts"]
    return [*arguments, *_of_kernel(view), "--dir", "/tmp", "--dir", image.user.home, *_readable(view)]


def _of_kernel(view: SandboxView) -> list[str]:
    arguments = ["--proc", "/proc", "--remount-ro", "/proc"]
    for name in EMPTY_IN_PROC:
        if os.path.exists(path := f"/proc/{name}"):
            arguments += ["--ro-bind", f"{view.etc}/{'nothing' if os.path.isdir(path) else 'empty'}", path]
    return [*arguments, "--dev", "/dev", "--size", str(view.scratch_mb * MIB), "--tmpfs", "/dev/shm"]


def _readable(view: SandboxView) -> list[str]:
    return [word for path in outermost(view.readable) for shown in open_to_others(path) for word in ("--ro-bind", shown, shown)]


def open_to_others(path: str) -> list[str]:
    """The path; what lies in it, if it is a folder that only its owner may enter. A sandbox of root is not its owner."""
    if os.geteuid() == 0 and os.path.isdir(path) and os.stat(path).st_mode & FOR_OTHERS != FOR_OTHERS:
        return [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return [path]


def outermost(paths: Iterable[str]) -> list[str]:
    """Sorted paths without those that lie below another one of them, or below /usr.

    >>> outermost(["/opt/a/b", "/usr/lib", "/opt/a"])
    ['/opt/a']
    """
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(Path(path).is_relative_to(parent) for parent in (*kept, "/usr")):
            kept.append(path)
    return kept
