"""Where sandboxes write to: a folder for each, which the kernel holds to its size, or which is looked at.

In memory: a file system of its own, of `limits.disk_mb` and `limits.files`, mounted where only sandboxes see it (`mounter.py`). What has no
name in it, or is written faster than anybody can look, counts like everything else. On disk: a folder of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Final, Protocol

from qwengyre.core.errors import LimitsRefused, SandboxError
from qwengyre.sandbox import mounter
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.isolation import interpreter
from qwengyre.sandbox.limits import MIB, OVERSHOOT, DiskUsage, disk_usage

HEADROOM: Final = 1.0625
"""Size of a space to its limit: who passes the limit is ended and told of it, who is faster than that meets the end of the space."""
MOUNT_POINT: Final = "space"
"""Name of the folder, in that of an execution, on which its space is mounted."""
WRITTEN: Final = ("workspace", "verifier")
"""What a sandbox may write to in its space: the harness to the first, a scorer to both."""
REQUEST_S: Final = 60.0
"""A mount takes less than a millisecond."""
NOT_IN_MEMORY: Final = (
    "the disk of an execution cannot be limited here: this user may mount no file system of its own for a workspace ({reason}). Start the "
    "run as a user who may make user namespaces (sysctl kernel.unprivileged_userns_clone=1, or "
    "kernel.apparmor_restrict_unprivileged_userns=0), or give the container what that takes (docker run --cap-add SYS_ADMIN, or "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined). Or set best_effort = true in [harness.limits]: then "
    "workspaces are on disk and are looked at every second"
)
ON_DISK: Final = (
    'the disk of an execution cannot be limited with workspace = "disk" in [harness.limits]: folders are looked at every second, and more '
    'can be written in between. Set workspace = "memory", or best_effort = true beside it'
)


class Space(Protocol):
    """What one sandbox writes to, once `make` was called."""

    @property
    def folder(self) -> Path:
        """Where this process reaches it."""

    @property
    def seen(self) -> Path:
        """Where programs that sandboxes are made by see it."""

    def make(self) -> None:
        """Raises OSError and SandboxError. Blocks."""

    def usage(self) -> DiskUsage:
        """What is in use. Raises OSError when that cannot be told. Blocks."""

    def remove(self) -> None:
        """Give it back, with what is in it; safe at any time. No process may be using it. Blocks."""


class FolderSpace:
    """In a folder of the disk, which is another's to remove."""

    def __init__(self, folder: Path, limits: LimitsConfig):
        self.folder = self.seen = folder
        self._limits = limits

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def usage(self) -> DiskUsage:
        found = [disk_usage(self.folder / name, self._limits.files * OVERSHOOT) for name in WRITTEN]
        return DiskUsage(sum(one.num_bytes for one in found), sum(one.num_files for one in found))

    def remove(self) -> None:
        pass


class MemorySpace:
    """A file system in memory, mounted on a folder in `folder`."""

    def __init__(self, folder: Path, limits: LimitsConfig, mounts: Mounts, times: int):
        self.seen = folder / MOUNT_POINT
        self._size = (int(limits.disk_mb * MIB * HEADROOM) * times, int(limits.files * HEADROOM) * times)
        self._mounts = mounts
        self._top = -1

    @property
    def folder(self) -> Path:
        return Path(f"/proc/self/fd/{self._top}")

    def make(self) -> None:
        self.seen.mkdir(parents=True, exist_ok=True)
        self._top = self._mounts.mount(self.seen, *self._size)

    def usage(self) -> DiskUsage:
        found = os.fstatvfs(self._top)
        return DiskUsage((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree - 1)

    def remove(self) -> None:
        if self._top >= 0:
            os.close(self._top)
            self._top = -1
            self._mounts.unmount(self.seen)


class Spaces:
    """Makes the spaces of one launcher. Raises LimitsRefused where they cannot be held to their size, and nobody said to go on."""

    def __init__(self, limits: LimitsConfig, *, isolated: bool):
        self._limits = limits
        self._mounts: Mounts | None = None
        if not isolated:
            return
        if limits.workspace == "disk":
            if not limits.best_effort:
                raise LimitsRefused(ON_DISK)
            return
        try:
            self._mounts = Mounts()
        except SandboxError as error:
            if not limits.best_effort:
                raise LimitsRefused(NOT_IN_MEMORY.format(reason=error)) from None

    def at(self, folder: Path, times: int = 1) -> Space:
        """A space for the execution, or evaluation, whose files are in `folder`; `times` as large as a workspace may be. Not made yet."""
        if self._mounts is None:
            return FolderSpace(folder, self._limits)
        return MemorySpace(folder, self._limits, self._mounts, times)

    @property
    def entrance(self) -> list[str]:
        """What a command line begins with whose program is to see the spaces."""
        return self._mounts.entrance if self._mounts else []

    def close(self) -> None:
        if self._mounts:
            self._mounts.close()


class Mounts:
    """The process that mounts, started again if it dies. Raises SandboxError where this user may mount nothing."""

    def __init__(self) -> None:
        self._nsenter = shutil.which("nsenter")
        if self._nsenter is None:
            raise SandboxError("nsenter is not installed: it is in the package util-linux")
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(REQUEST_S)
        command = [interpreter(), "-I", "-S", mounter.__file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={}, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            self._reply()
        except (OSError, SandboxError) as error:
            self.close()
            raise SandboxError(str(error)) from None

    @property
    def entrance(self) -> list[str]:
        namespaces = f"/proc/{self._process.pid}/ns"
        user = [f"--user={namespaces}/user", "--preserve-credentials"] if os.geteuid() != 0 else []
        return [str(self._nsenter), *user, f"--mount={namespaces}/mnt", "--"]

    def mount(self, folder: Path, num_bytes: int, num_files: int) -> int:
        """Mount an empty file system on an empty folder; a descriptor of it, the caller's own. Raises SandboxError."""
        request = {"mount": str(folder), "num_bytes": num_bytes, "num_files": num_files}
        with self._lock:
            try:
                (top,) = self._ask(request)
            except OSError:  # it was killed, as for memory
                self.close()
                self._start()
                (top,) = self._ask(request)
        return top

    def unmount(self, folder: Path) -> None:
        with self._lock, contextlib.suppress(OSError, SandboxError):  # what another process mounted went with it
            self._ask({"unmount": str(folder)})

    def _ask(self, request: dict[str, object]) -> list[int]:
        self._channel.send(json.dumps(request).encode())
        return self._reply()

    def _reply(self) -> list[int]:
        """Descriptors that came with the answer. Raises OSError when the process is gone, SandboxError with what it objects to."""
        said, fds, _, _ = socket.recv_fds(self._channel, mounter.REQUEST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not said:
            raise ConnectionResetError("the process that mounts workspaces died")
        if said != b"1":
            raise SandboxError(said[1:].decode(errors="replace"))
        return fds

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()
