"""What all sandboxes of one launcher share: bubblewrap, the cgroup parent, the /etc that they see, their environment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import LimitsRefused, SandboxError
from qwengyre.images.image import Image
from qwengyre.sandbox import inside
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.identities import AGENT, Shown, find_identities
from qwengyre.sandbox.isolation import (
    GATEWAY_FOLDER,
    HOME,
    INSIDE,
    RELAY_PORT,
    WORKSPACE,
    Identity,
    Mount,
    SandboxView,
    bwrap_arguments,
    find_bwrap,
    interpreter,
    interpreter_folders,
    write_etc,
)
from qwengyre.sandbox.limits import CGROUP_PREFIX, MIB, Cgroup, find_cgroup_parent, resource_limits, shell_close, shell_prelude
from qwengyre.sandbox.logs import LogPipe
from qwengyre.sandbox.on_image import ImageRoot, OwnPython, check_image, image_has, workspace_of
from qwengyre.sandbox.plans import BoundsPlan, ColdPlan, RelayPlan
from qwengyre.sandbox.process import Process, Program, nameless_file, run
from qwengyre.sandbox.room import Room
from qwengyre.sandbox.seccomp import MACHINES, filter_program
from qwengyre.sandbox.spaces import Spaces
from qwengyre.sandbox.spawner import Spawner

log = logging.getLogger(__name__)

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DIE_WITH_PARENT: Final = f"{setpriv} --pdeathsig KILL" if (setpriv := shutil.which("setpriv", path=SYSTEM_PATH)) else ""
"""bubblewrap 0.8 loses its own --die-with-parent for process 1 where --disable-userns is used by a normal user."""

NO_CGROUPS: Final = (
    "the {what} of an execution cannot be limited here: this user may make no cgroups for it. Start the run in a cgroup of its own "
    "(systemd-run --user --scope -p Delegate=yes qwengyre train ...), or give the container its own, writable (docker run --cgroupns "
    "private, with /sys/fs/cgroup mounted read-write). Or set best_effort = true in [harness.limits], for harnesses and policies "
    "that will not use up the machine"
)


class SandboxHost:
    """Make command lines, environments and cgroups of sandboxes. Raises SandboxError when isolation cannot be given."""

    def __init__(self, config: HarnessConfig, work: Path):
        self.config = config
        self.work = work = Path(os.path.abspath(work))
        self.isolated = config.isolation == "bwrap"
        self.bwrap = find_bwrap() if self.isolated else ""
        if self.isolated and platform.machine() not in MACHINES:
            raise SandboxError(
                f"no filter of system calls for {platform.machine()}: a sandbox needs one of {', '.join(MACHINES)}"
            )
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.etc = work / "etc"
        write_etc(self.etc)
        (work / "root").mkdir(exist_ok=True)
        self._module_folders = module_folders(config)
        self.readable = (*interpreter_folders(), *self._module_folders, *config.readable)
        for path in config.readable:
            if work.resolve().is_relative_to(Path(path).resolve()):
                raise SandboxError(f"harness.readable: {path} would show every execution the workspaces of the others in {work}")
        self._dying: list[Cgroup] = []
        self.cgroups = find_cgroup_parent(f"{CGROUP_PREFIX}{os.getpid()}-{id(self):x}")
        if self.isolated and not config.limits.best_effort and (unlimited := self._unlimited()):
            self.close_cgroups()
            raise LimitsRefused(NO_CGROUPS.format(what=unlimited))
        self._identities = find_identities() if self.isolated else None
        self.spaces = self._find_spaces()
        self._spawner = Spawner()

    def _find_spaces(self) -> Spaces:
        try:
            return Spaces(self.config.limits, isolated=self.isolated)
        except SandboxError:
            self.close_cgroups()
            raise

    def _unlimited(self) -> str:
        """What of an execution as a whole the kernel cannot be made to limit here."""
        if self.cgroups is None:
            return "memory and processors"
        return "" if "cpu" in self.cgroups.folders else "processors"

    @functools.cached_property
    def own_python(self) -> OwnPython:
        """As an image has it."""
        return OwnPython(self._module_folders, [path for path in sys.path if path])

    def environment(self, home: str, image: Image | None = None) -> dict[str, str]:
        """Variables that every program in a sandbox gets, and no others of the host. An image's own win over those of a machine."""
        if image is not None:
            system = {
                "PATH": SYSTEM_PATH,
                "HOME": home,
                "USER": image.user.name,
                "LOGNAME": image.user.name,
                "SHELL": "/bin/bash",
            }
            return system | {"TERM": "dumb", "LANG": "C.UTF-8", "NO_PROXY": "127.0.0.1,localhost"} | image.env
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

    def home(self, folder: Path, image: Image | None = None) -> str:
        """HOME of an execution whose files are in `folder`; under bwrap a place in the sandbox's own /tmp, or the image's."""
        if self.isolated:
            return image.user.home if image else HOME
        home = folder / "scratch" / "home"
        home.mkdir(parents=True, exist_ok=True)
        return str(home)

    def view(self, mounts: Sequence[Mount], gateway_socket: str = "", image: Image | None = None) -> SandboxView:
        """What a sandbox sees; with the gateway's socket, its folder and the relay to it, and nothing else of the gateway.

        The folder is mounted, not the socket: a gateway that is started again makes a new socket, which running harnesses must find.
        Raises ImageError for an image in which that has no place.
        """
        limits = self.config.limits
        if gateway_socket:
            folder, name = os.path.split(gateway_socket)
            mounts = [*mounts, Mount(folder, GATEWAY_FOLDER)]
            gateway_socket = f"{GATEWAY_FOLDER}/{name}"
        if gateway_socket or image:
            mounts = [*mounts, Mount(inside.__file__, INSIDE)]
        if image is None:
            return SandboxView(tuple(mounts), self.readable, str(self.etc), limits.scratch_mb, gateway_socket=gateway_socket)
        mounts = [*mounts, *self.own_python.mounts]
        readable = self.config.readable
        targets = (
            "/proc",
            "/dev",
            "/etc/hosts",
            "/tmp",
            "/logs/agent",
            image.user.home,
            *(mount.target for mount in mounts),
            *readable,
        )
        check_image(image, targets)
        workspace = workspace_of(image, WORKSPACE)
        links = tuple((name, workspace) for name in (WORKSPACE, "/app") if name != workspace and not image_has(image, name))
        room = (limits.scratch_mb * MIB, limits.files)
        root = ImageRoot(image.root, str(self.work / "root"), *room, image.user, links)
        return SandboxView(
            tuple(mounts), readable, str(self.etc), limits.scratch_mb, workspace, gateway_socket=gateway_socket, image=root
        )

    @contextlib.contextmanager
    def room(self, name: str, log_file: Path, image: Image | None = None) -> Iterator[Room]:
        """What one sandbox has of the machine; what it prints goes to `log_file`. Every process of it must have ended at the end."""
        self._dying = [cgroup for cgroup in self._dying if not cgroup.remove()]
        with contextlib.ExitStack() as stack:
            identity = stack.enter_context(self._identities.taken(shown_by(image))) if self._identities else None
            pipe = LogPipe(log_file, identity.uid if identity else None)
            stack.callback(pipe.close)
            cgroup = self.cgroups.create(name, self.config.limits) if self.cgroups else Cgroup()
            stack.callback(self._forget, cgroup)
            fds = cgroup.open_procs()
            stack.callback(_close, fds)
            yield Room(cgroup, fds, identity, pipe.writer)

    def _forget(self, cgroup: Cgroup) -> None:
        if not cgroup.remove():
            self._dying.append(cgroup)

    def start(self, program: Program) -> Process:
        """Start a program of this machine. Raises OSError (FileNotFoundError and the like)."""
        return self._spawner.start(program)

    def start_supervised(self, program: Program, room: Room, view: SandboxView | None, *, cwd: str, stdin: str) -> Process:
        """Start a program below `inside.py`, the first process of its sandbox. No view: without isolation."""
        reader, writer = os.pipe()
        own = nameless_file("harness", json.dumps({"command": list(program.command), "env": program.env}).encode())
        bounds = BoundsPlan(cgroup_fds=list(room.cgroup_fds), rlimits=self.rlimits())
        relay = RelayPlan(port=RELAY_PORT, socket=view.gateway_socket) if view else None
        plan = ColdPlan(
            **bounds, cwd=cwd, stdin=stdin, harness=own, lifeline=reader, subreaper=view is None, relay=relay, replaces=False
        )
        python = self.own_python.bare() if view and view.image else [interpreter(), "-I", "-S"]
        supervisor = msgspec.structs.replace(
            program,
            command=[*python, INSIDE if view else inside.__file__, json.dumps(plan)],
            env={},
            pass_fds=room.cgroup_fds,
            handed_fds=(own, reader),
            lifeline=writer,
        )
        try:
            return self.start(self.sandboxed(view, supervisor, room.identity) if view else supervisor)
        except BaseException:
            os.close(writer)
            raise

    def start_script(self, script: str, room: Room, view: SandboxView, environment: dict[str, str]) -> Process:
        """Start bash with this script as the first process of a sandbox, under the same limits as a harness."""
        bash = "/bin/bash --noprofile --norc"
        if view.image is not None:
            return self._start_script_on_image([*bash.split(), script], room, view, environment)
        limits = shell_prelude(self.rlimits(), room.cgroup_fds)
        prelude = f"exec </dev/null && {shell_close(room.identity_fds)} && {limits} && umask 022"
        command = [*bash.split(), "-c", f"{prelude} && exec {DIE_WITH_PARENT} {bash} {script}"]
        program = Program(command, environment, room.output, pass_fds=room.cgroup_fds)
        return self.start(self.sandboxed(view, program, room.identity))

    def _start_script_on_image(
        self, command: Sequence[str], room: Room, view: SandboxView, environment: dict[str, str]
    ) -> Process:
        """Limits are set by our own program: an image's bash is somebody else's, and need not do what it is told."""
        own = nameless_file("script", json.dumps({"command": list(command), "env": environment}).encode())
        bounds = BoundsPlan(cgroup_fds=list(room.cgroup_fds), rlimits=self.rlimits())
        plan = ColdPlan(
            **bounds, cwd=view.chdir, stdin=os.devnull, harness=own, lifeline=-1, subreaper=False, relay=None, replaces=True
        )
        supervisor = [*self.own_python.bare(INSIDE), json.dumps(plan)]
        program = Program(supervisor, {}, room.output, pass_fds=room.cgroup_fds, handed_fds=(own,))
        return self.start(self.sandboxed(view, program, room.identity))

    def sandboxed(self, view: SandboxView, program: Program, identity: Identity | None) -> Program:
        """bubblewrap, which makes a sandbox with this view and starts `program` in it, with its variables and no others.

        The program inherits the descriptors of the identity, and must close them.
        """
        bwrap, *options, end = bwrap_arguments(self.bwrap, view, program.env, identity)
        filtered = nameless_file("filter", filter_program())
        told = nameless_file("options", os.fsencode("\0".join([*options, "--seccomp", str(filtered)])))
        command = [bwrap, "--args", str(told), end, *program.command]
        if view.image:
            command = view.image.command(identity.uid if identity else None, command)
        return msgspec.structs.replace(
            program,
            command=[*self.spaces.entrance, *command],
            env={},
            pass_fds=(*program.pass_fds, *((identity.outer, identity.inner) if identity else ())),
            handed_fds=(*program.handed_fds, told, filtered),
            is_sandbox=True,
        )

    def run(
        self, program: Program, view: SandboxView | None, timeout_s: float, image: Image | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of ours to its end, in a sandbox if there is a view. Raises OSError and subprocess.TimeoutExpired."""
        shown = shown_by(image)
        with self._identities.taken(shown) if self._identities else contextlib.nullcontext() as identity:
            return run(self.sandboxed(view, program, identity) if view else program, timeout_s)

    def rlimits(self) -> dict[str, int]:
        """Resource limits of each process of a sandbox."""
        return resource_limits(self.config.limits, has_cgroup=self.cgroups is not None)

    def close_cgroups(self) -> None:
        self._dying = [cgroup for cgroup in self._dying if not cgroup.remove()]
        if self.cgroups:
            self.cgroups.remove()

    def close(self) -> None:
        """Give everything back. Every sandbox must have ended."""
        self.close_cgroups()
        self._spawner.close()
        self.spaces.close()
        if self._identities:
            self._identities.close()


def shown_by(image: Image | None) -> Shown:
    """The numbers that a sandbox shows its user."""
    return Shown(image.user.uid, image.user.gid) if image else AGENT


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def is_own_python(config: HarnessConfig) -> bool:
    """Whether the command starts with the Python that QwenGyre runs on."""
    return config.command[0] in ("python", "python3", sys.executable)


def module_folders(config: HarnessConfig) -> list[str]:
    """Folders of the packages that the command runs or that are imported ahead, wherever they are installed.

    Looked for in this environment and in the PYTHONPATH of `env`. Raises SandboxError when one is nowhere.
    """
    names = (*((config.module,) if config.module and is_own_python(config) else ()), *config.warm_modules)
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
