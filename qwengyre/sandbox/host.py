"""What all sandboxes of one launcher share: bubblewrap, the cgroup parent, the /etc that they see, their environment."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox import inside
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.isolation import (
    GATEWAY_FOLDER,
    HOME,
    INSIDE,
    RELAY_PORT,
    Mount,
    View,
    bwrap_arguments,
    find_bwrap,
    interpreter,
    interpreter_folders,
    write_etc,
)
from qwengyre.sandbox.limits import CGROUP_PREFIX, Cgroup, find_cgroup_parent, resource_limits, shell_prelude
from qwengyre.sandbox.process import Process, Program, nameless_file, start
from qwengyre.sandbox.seccomp import MACHINES, filter_program

log = logging.getLogger(__name__)

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DIE_WITH_PARENT: Final = f"{setpriv} --pdeathsig KILL" if (setpriv := shutil.which("setpriv", path=SYSTEM_PATH)) else ""
"""bubblewrap 0.8 loses its own --die-with-parent for process 1 where --disable-userns is used by a normal user."""
LOG_TAIL_BYTES: Final = 2000


class SandboxHost:
    """Make command lines, environments and cgroups of sandboxes. Raises SandboxError when isolation cannot be given."""

    def __init__(self, config: HarnessConfig, work: Path):
        self.config = config
        self.work = work
        self.isolated = config.isolation == "bwrap"
        self.bwrap = find_bwrap() if self.isolated else ""
        if self.isolated and platform.machine() not in MACHINES:
            raise SandboxError(
                f"no filter of system calls for {platform.machine()}: a sandbox needs one of {', '.join(MACHINES)}"
            )
        self.etc = work / "etc"
        write_etc(self.etc)
        self.readable = (*interpreter_folders(), *module_folders(config), *config.readable)
        for path in config.readable:
            if work.resolve().is_relative_to(Path(path).resolve()):
                raise SandboxError(f"harness.readable: {path} would show every execution the workspaces of the others in {work}")
        self._dying: list[Cgroup] = []
        self.cgroups = find_cgroup_parent(f"{CGROUP_PREFIX}{os.getpid()}-{id(self):x}")

    def environment(self, home: str) -> dict[str, str]:
        """Variables that every program in a sandbox gets, and no others of the host."""
        return {
            "PATH": f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}",
            "HOME": home,
            "TMPDIR": os.path.dirname(home),
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def home(self, folder: Path) -> str:
        """HOME of an execution whose files are in `folder`; under bwrap a place in the sandbox's own /tmp."""
        if self.isolated:
            return HOME
        home = folder / "scratch" / "home"
        home.mkdir(parents=True, exist_ok=True)
        return str(home)

    def view(self, mounts: Sequence[Mount], gateway_socket: str = "") -> View:
        """What a sandbox sees; with the gateway's socket, its folder and the relay to it, and nothing else of the gateway.

        The folder is mounted, not the socket: a gateway that is started again makes a new socket, which running harnesses must find.
        """
        if gateway_socket:
            folder, name = os.path.split(gateway_socket)
            mounts = [*mounts, Mount(folder, GATEWAY_FOLDER), Mount(inside.__file__, INSIDE)]
            gateway_socket = f"{GATEWAY_FOLDER}/{name}"
        return View(tuple(mounts), self.readable, str(self.etc), self.config.limits.scratch_mb, gateway_socket=gateway_socket)

    def start_supervised(self, program: Program, view: View | None, cwd: str) -> Process:
        """Start a program below `inside.py`, the first process of its sandbox. No view: without isolation."""
        reader, writer = os.pipe()
        own = nameless_file("harness", json.dumps({"command": list(program.command), "env": program.env}).encode())
        plan = self.plan(program.pass_fds)
        plan |= {"cwd": cwd, "harness": own, "lifeline": reader, "subreaper": view is None}
        plan["relay"] = {"port": RELAY_PORT, "socket": view.gateway_socket} if view else None
        supervisor = msgspec.structs.replace(
            program,
            command=[interpreter(), "-I", "-S", INSIDE if view else inside.__file__, json.dumps(plan)],
            env={},
            handed_fds=(own, reader),
            lifeline=writer,
        )
        try:
            return start(self.sandboxed(view, supervisor) if view else supervisor)
        except BaseException:
            os.close(writer)
            raise

    def sandboxed(self, view: View, program: Program) -> Program:
        """bubblewrap, which makes a sandbox with this view and starts `program` in it, with its variables and no others."""
        bwrap, *options, end = bwrap_arguments(self.bwrap, view, program.env)
        filtered = nameless_file("filter", filter_program())
        told = nameless_file("options", os.fsencode("\0".join([*options, "--seccomp", str(filtered)])))
        command = [bwrap, "--args", str(told), end, *program.command]
        handed = (*program.handed_fds, told, filtered)
        return msgspec.structs.replace(program, command=command, env={}, handed_fds=handed, is_sandbox=True)

    def script_command(self, script: str, cgroup_fds: Sequence[int]) -> list[str]:
        """A command line for a sandbox: bash with this script, under the same limits."""
        prelude = shell_prelude(self.plan(cgroup_fds)["rlimits"], cgroup_fds)
        bash = "/bin/bash --noprofile --norc"
        return [*bash.split(), "-c", f"{prelude} && exec {DIE_WITH_PARENT} {bash} {script}"]

    def plan(self, cgroup_fds: Sequence[int]) -> dict:
        """What `inside.apply_limits` needs."""
        limits = resource_limits(self.config.limits, has_cgroup=self.cgroups is not None)
        return {"cgroup_fds": list(cgroup_fds), "rlimits": limits}

    @contextlib.contextmanager
    def cgroup(self, name: str) -> Iterator[tuple[Cgroup, list[int]]]:
        """The cgroup of one sandbox and descriptors to join it by, closed and removed at the end."""
        self._dying = [cgroup for cgroup in self._dying if not cgroup.remove()]
        cgroup = self.cgroups.create(name, self.config.limits) if self.cgroups else Cgroup()
        fds = cgroup.open_procs()
        try:
            yield cgroup, fds
        finally:
            for fd in fds:
                os.close(fd)
            if not cgroup.remove():
                self._dying.append(cgroup)

    def close(self) -> None:
        """Remove the cgroups. Every sandbox must have ended."""
        self._dying = [cgroup for cgroup in self._dying if not cgroup.remove()]
        if self.cgroups:
            self.cgroups.remove()


def module_folders(config: HarnessConfig) -> list[str]:
    """Folders of the packages that the command runs or that are imported ahead, wherever they are installed.

    Looked for in this environment and in the PYTHONPATH of `env`. Raises SandboxError when one is nowhere.
    """
    own_python = config.command[0] in ("python", "python3", sys.executable)
    names = (*((config.module,) if config.module and own_python else ()), *config.warm_modules)
    search = [*filter(None, config.env.get("PYTHONPATH", "").split(":")), *(path for path in sys.path if path)]
    folders: list[str] = []
    for name in names:
        top = name.partition(".")[0]
        found = PathFinder.find_spec(top, search) or importlib.util.find_spec(top)
        if found is None and name not in sys.builtin_module_names:
            raise SandboxError(f"harness: module {name} is not installed in this environment ({sys.executable})")
        if found is not None:
            folders += found.submodule_search_locations or ([found.origin] if found.origin else [])
    return folders


def log_tail(path: Path, secret: str = "") -> str:
    """The last bytes of a log file as text, without `secret`; empty when there is no log."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
    return text.replace(secret, "<key>") if secret else text
