"""Limits of a sandbox: memory, processes and processors by cgroups where this user may make them, resource limits in any case."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.tree import FolderMoved, measure

MIB: Final = 1024 * 1024
CGROUP_PREFIX: Final = "qwengyre-"
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
OVERSHOOT: Final = 2
"""A workspace up to this many times over its disk limit is still scored: the watcher needs a moment to notice. Its scorer may write as much."""
MOVED_TRIES: Final = 3
"""A program that moves a folder while it is measured seldom does so twice in a row."""
_V1: Final = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"}
_V2: Final = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}
_NEEDED: Final = ("memory", "pids")
"""Without these two a launcher makes no cgroups."""
CPU_PERIOD_US: Final = 100_000
"""The kernel's default."""
_WEIGHTS: Final = {"cpu.weight": 100, "cpu.shares": 1024}
"""File of the group of all sandboxes -> what one process weighs beside it; v2, v1."""
_NO_SWAP: Final = {"memory.swap.max": "0", "memory.memsw.limit_in_bytes": ""}
"""File -> value that keeps a sandbox from swapping out what it may not hold; empty: its limit of memory. v2, v1."""


class CgroupParent(msgspec.Struct, frozen=True):
    """Folders under which cgroups of executions are made: one for both controllers (v2), or one each (v1)."""

    folders: dict[str, Path]
    """Controller name -> folder."""
    files: dict[str, str]
    """Controller name -> name of its limit file."""

    def create(self, name: str, limits: LimitsConfig) -> Cgroup:
        """Make the cgroup of one sandbox. Raises OSError when it cannot be made."""
        quota = str(int(limits.cpus * CPU_PERIOD_US))
        memory = str(limits.memory_mb * MIB)
        values = {
            "memory": memory,
            "pids": str(limits.processes),
            "cpu": quota if self.files is _V1 else f"{quota} {CPU_PERIOD_US}",
        }
        folders = sorted({folder / name for folder in self.folders.values()})
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for controller, folder in self.folders.items():
            (folder / name / self.files[controller]).write_text(values[controller])
        for file, value in _NO_SWAP.items():
            if (path := self.folders["memory"] / name / file).exists():
                path.write_text(value or memory)
        return Cgroup(folders=tuple(folders))

    def weigh(self) -> None:
        """Let all sandboxes together weigh as much as one busy process of each processor: what they do not need is others' anyway."""
        for file, one in _WEIGHTS.items():
            if "cpu" in self.folders and (path := self.folders["cpu"] / file).exists():
                path.write_text(str(one * (os.cpu_count() or 1)))

    def remove(self) -> None:
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Cgroup(msgspec.Struct, frozen=True):
    """The cgroup of one sandbox; no process in it once the sandbox has ended."""

    folders: tuple[Path, ...] = ()

    def open_procs(self) -> list[int]:
        """Descriptors that a process joins by writing `0` to; the caller closes its own copies."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders]

    def memory_kills(self) -> int:
        """How many processes the kernel killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def remove(self) -> bool:
        """Remove the cgroup; False while a dying process is still in it."""
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def find_cgroup_parent(name: str, root: Path = CGROUP_ROOT, own: str | None = None) -> CgroupParent | None:
    """Make the folder `name` for the cgroups of a launcher; None where this user may not limit memory and processes so.

    `own` is the text of /proc/self/cgroup (read when None). v1: below the own group of each controller. v2: below the own
    group, or below the root for a privileged user, where both controllers are delegated.
    """
    groups = _own_groups(Path("/proc/self/cgroup").read_text() if own is None else own)
    if (root / "cgroup.controllers").exists():
        for base in (root / groups.get("", "/").lstrip("/"), root):
            with contextlib.suppress(OSError):
                return _parent(dict.fromkeys(_delegated(base, root), base / name), _V2)
        return None
    bases = {key: root / key / groups.get(key, "/").lstrip("/") for key in _V1}
    for keys in (_V1, _NEEDED):
        with contextlib.suppress(OSError):
            return _parent({key: bases[key] / name for key in keys}, _V1)
    return None


def _delegated(base: Path, root: Path) -> list[str]:
    """Controllers that groups below `base` can have, switched on there. Raises OSError when one that is needed is not among them.

    A group with processes in it hands none down: a normal user's own, as `systemd-run --user --scope -p Delegate=yes` makes it, has its
    processes moved into one below it.
    """
    listed = base / "cgroup.controllers"
    have = (listed if listed.exists() else root / "cgroup.controllers").read_text().split()
    wanted = [controller for controller in _V2 if controller in have]
    if not set(_NEEDED) <= set(wanted):
        raise OSError(errno.ENOENT, "no controllers of memory and processes")
    control = base / "cgroup.subtree_control"
    missing = set(wanted) - set(control.read_text().split() if control.exists() else ())
    if missing:
        order = " ".join(f"+{controller}" for controller in wanted)
        try:
            control.write_text(order)
        except OSError as error:  # what cannot be switched on shows when a group with a limit is made
            if error.errno == errno.EBUSY and os.geteuid() != 0:
                _empty_into_child(base)
                control.write_text(order)
    return wanted


def _empty_into_child(base: Path) -> None:
    inner = base / "qwengyre-own"
    inner.mkdir(exist_ok=True)
    for pid in (base / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (inner / "cgroup.procs").write_text(pid)


def _own_groups(text: str) -> dict[str, str]:
    """Controller name (empty for v2) -> path of the own group."""
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _parent(folders: dict[str, Path], files: dict[str, str]) -> CgroupParent:
    """Make the folders, remove those of launchers that were killed, and prove with one trial cgroup that limits can be set. Raises OSError."""
    made = []
    try:
        for folder in set(folders.values()):
            _remove_abandoned(folder.parent)
            folder.mkdir()
            made.append(folder)
        if files is _V2:
            (made[0] / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in folders))
        parent = CgroupParent(folders=folders, files=files)
        parent.create("trial", LimitsConfig()).remove()
        parent.weigh()
        return parent
    except OSError:
        for folder in made:
            with contextlib.suppress(OSError):
                (folder / "trial").rmdir()
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _remove_abandoned(base: Path) -> None:
    """Remove cgroups below `base` whose launcher (the process in their name) is gone."""
    for folder in base.glob(f"{CGROUP_PREFIX}*"):
        pid = folder.name.removeprefix(CGROUP_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            for child in (*folder.glob("*/"), folder):
                with contextlib.suppress(OSError):
                    child.rmdir()


def resource_limits(limits: LimitsConfig, *, has_cgroup: bool) -> dict[str, int]:
    """Name -> value of the resource limits of each process of a sandbox.

    Without a cgroup RLIMIT_DATA bounds the writable memory of each process; RLIMIT_NPROC counts per user namespace, so per sandbox
    (and does not bind root, which can make cgroups).
    """
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.disk_mb * MIB,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": limits.processes,
    }
    return values if has_cgroup else values | {"RLIMIT_DATA": limits.memory_mb * MIB}


_ULIMIT: Final = {
    "RLIMIT_CORE": ("-c", 1024),
    "RLIMIT_FSIZE": ("-f", 1024),
    "RLIMIT_NOFILE": ("-n", 1),
    "RLIMIT_NPROC": ("-u", 1),
}


def shell_prelude(rlimits: dict[str, int], cgroup_fds: Sequence[int]) -> str:
    """The same limits as `inside.apply_limits`, for a sandbox whose first process is bash (cheaper than a Python start)."""
    flags = _ULIMIT | {"RLIMIT_DATA": ("-d", 1024)}
    join = [f"printf 0 >&{fd} && exec {fd}>&-" for fd in cgroup_fds]
    limit = [f"ulimit {flag} {rlimits[name] // unit}" for name, (flag, unit) in flags.items() if name in rlimits]
    return " && ".join([*join, *limit])


def shell_close(fds: Sequence[int]) -> str:
    """Bash that closes descriptors."""
    return " ".join(["exec", *(f"{fd}>&-" for fd in fds)])


class DiskUsage(msgspec.Struct, frozen=True):
    """Disk in use below a folder, counted up to a bound."""

    num_bytes: int
    num_files: int

    def over(self, limits: LimitsConfig, times: int = 1) -> str:
        """Which limit is passed so many times, as a sentence; empty when none is."""
        if self.num_bytes > limits.disk_mb * MIB * times:
            return f"the workspace passed its limit of {limits.disk_mb} MB (limits.disk_mb)"
        if self.num_files > limits.files * times:
            return f"the workspace passed its limit of {limits.files} files (limits.files)"
        return ""


def disk_usage(folder: Path, max_files: int) -> DiskUsage:
    """Blocks in use below `folder`, links not followed; stops counting one past `max_files`.

    Raises FolderMoved when folders are moved about in it each time it looks.
    """
    for _ in range(MOVED_TRIES - 1):
        with contextlib.suppress(FolderMoved):
            return DiskUsage(*measure(folder, max_files))
    return DiskUsage(*measure(folder, max_files))
