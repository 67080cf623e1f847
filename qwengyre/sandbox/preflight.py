"""Prove, before anything is dispatched, that a harness can be started here; say what to change when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError, ImageError, SandboxError
from qwengyre.images.image import Image
from qwengyre.sandbox.command import SHELLS, Runs, first_program, interpreter_of, runs
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import on_image
from qwengyre.sandbox.host import SandboxHost, is_own_python
from qwengyre.sandbox.on_image import image_has, loader_of
from qwengyre.sandbox.process import Program

PROBE_TIMEOUT_S: Final = 60.0  # it prints one line; the rest is for an image on a cold disk
NOT_FOUND, NO_INTERPRETER, NO_FILE = 3, 4, 5
PROBE: Final = f"""printf ready
program=$(command -v -- "$1") || exit {NOT_FOUND}
for file in "${{@:2}}"; do [ -e "$file" ] || {{ printf "\\n%s" "$file"; exit {NO_FILE}; }}; done
IFS= read -r -n 500 line < "$program"
case $line in "#!"*) set -- ${{line#??}}; [ -x "$1" ] || {{ printf "\\n%s" "$1"; exit {NO_INTERPRETER}; }};; esac
exit 0
"""
"""Finds the command, the files it is given, and the interpreter that its first line names: a script without one fails as if it were
not there."""
FIND_MODULE: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
RUNTIME: Final = "name a static build of it, or install it in the image"
OWN_IN_THE_SANDBOX: Final = ("/tmp/", "/dev/", "/workspace", "/app", "/logs", "/tests", "/proc/", "/run/", "/var/tmp/")
"""What lies there is the sandbox's own, whatever this machine has there."""
IN_WORKSPACE: Final = ("/workspace/", "/app/")
"""Where a workspace is in a sandbox."""
NO_NAMESPACES: Final = (
    "bubblewrap cannot make a sandbox on this machine: {reason}\nUser namespaces may be off (sysctl kernel.unprivileged_userns_clone=1, "
    "or kernel.apparmor_restrict_unprivileged_userns=0), or this is a container that forbids them (docker run --security-opt "
    'seccomp=unconfined --security-opt systempaths=unconfined). isolation = "none" in [harness] does without, for a trusted harness'
)


def check_harness(config: HarnessConfig, workspaces: Sequence[Path] | None = None) -> None:
    """Start a sandbox and look in it for the harness's command, and for what an interpreter or a shell in it is to run.

    `workspaces` are the folders that tasks put into a workspace, where a relative path may lead; None when they are not known.
    Raises SandboxError when isolation cannot be given, and ConfigError when the command does not exist or cannot be seen.
    """
    missing = [
        ConfigError(f"{path} does not exist: name the folder that the harness is installed in", key="harness.readable")
        for path in config.readable
        if not Path(path).exists()
    ]
    if missing:
        raise ConfigError.of_all(missing)
    script = runs(config.command)
    files = _files(config, script, workspaces)
    with tempfile.TemporaryDirectory(prefix="qwengyre-check-") as work:
        host = SandboxHost(config, Path(work))
        try:
            _find_command(host, config.command[0], files)
            if script is not None:
                _find_inner(host, script, workspaces)
        finally:
            host.close()


def check_on_images(images: Iterable[Image], config: HarnessConfig) -> None:
    """Start a sandbox on each image and look in it for the harness's command. Raises ImageError and ConfigError, naming the image."""
    distinct = {(image.digest, image.workdir, image.user): image for image in images}
    if not distinct:
        return
    with tempfile.TemporaryDirectory(prefix="qwengyre-check-") as work:
        host = SandboxHost(config, Path(work))
        try:
            for image in distinct.values():
                _check_on_image(host, image)
        finally:
            host.close()


def _check_on_image(host: SandboxHost, image: Image) -> None:
    program = host.config.command[0]
    if is_own_python(host.config):
        on_image(host, image, host.config.command)
        command = host.own_python.bare("-c", "print('ready')")
    else:
        command = ["/bin/bash", "-c", PROBE, "bash", program]
    environment = host.environment(host.home(host.work, image), image) | host.config.env
    view = msgspec.structs.replace(host.view([], image=image), chdir="/")
    done = host.run(Program(command, environment, subprocess.PIPE), view, PROBE_TIMEOUT_S, image)
    found, _, missing = done.stdout.partition("\n")
    if found != "ready":
        raise ImageError(f"image {image.name}: no sandbox can be made on it: {done.stderr.strip()}")
    if done.returncode == NO_INTERPRETER:
        message = f"{program} is run by {missing}, which image {image.name} does not have: {RUNTIME}"
        raise ConfigError(message, key="harness.command")
    if done.returncode:
        message = f"{program} is not in image {image.name}: install it there, or mount it with readable and write its path"
        raise ConfigError(message, key="harness.command")
    loader = loader_of(Path(program)) if os.path.isfile(program) and not image_has(image, program) else ""
    if loader and not image_has(image, loader):
        raise ConfigError(
            f"{program} is started by {loader}, which image {image.name} does not have: {RUNTIME}", key="harness.command"
        )


def _files(config: HarnessConfig, script: Runs | None, workspaces: Sequence[Path] | None) -> list[str]:
    """Files of this machine that the command names. Raises ConfigError for a script that no harness would find."""
    own = OWN_IN_THE_SANDBOX if config.isolation == "bwrap" else ()
    files = [word for word in config.command[1:] if word.startswith("/") and not word.startswith(own) and os.path.exists(word)]
    if script is None or script.kind != "file" or "{" in script.what:  # a placeholder
        return files
    path = next((script.what[len(folder) :] for folder in IN_WORKSPACE if own and script.what.startswith(folder)), script.what)
    if os.path.isabs(path):
        if not os.path.exists(path):
            raise ConfigError(f"{path} does not exist", key="harness.command")
        return list(dict.fromkeys([*files, path]))
    if path == script.what and os.path.isfile(path):
        message = f"a harness starts in its own workspace, where {path} is not: write {os.path.abspath(path)}"
        raise ConfigError(message, key="harness.command")
    if workspaces is not None and not any((folder / path).exists() for folder in workspaces):
        where = f"it was looked for in {os.getcwd()} and in the environment/ of every task"
        raise ConfigError(f"{script.what} does not exist: {where}; write an absolute path", key="harness.command")
    return files


def _find_inner(host: SandboxHost, script: Runs, workspaces: Sequence[Path] | None) -> None:
    """Look for a module that an interpreter is to run, and for the program that a shell's code starts with. Raises ConfigError."""
    config = host.config
    if script.kind == "module":
        top = script.what.partition(".")[0]
        if any((folder / name).exists() for folder in workspaces or () for name in (top, f"{top}.py")):
            return
        if _run_inside(host, [config.command[0], "-c", FIND_MODULE, script.what]):
            message = (
                f"{config.command[0]} finds no module {script.what} in the sandbox: install it for this interpreter, name the"
            )
            raise ConfigError(f"{message} one that has it, or set env.PYTHONPATH and readable", key="harness.command")
    elif script.kind == "code" and interpreter_of(config.command[0]) in SHELLS:
        program = first_program(script.what)
        is_relative = program and "/" in program and not program.startswith("/")
        if program and not is_relative and _run_inside(host, ["/bin/bash", "-c", 'command -v -- "$1"', "bash", program]):
            message = (
                f"{program}, which the shell is to start, is not in the sandbox: install it, or add its folder to readable and"
            )
            raise ConfigError(f"{message} write its absolute path", key="harness.command")


def _run_inside(host: SandboxHost, command: list[str]) -> int:
    """The exit code of a command, with the variables of a harness."""
    return _probed(host, Program(command, host.environment(host.home(host.work)) | host.config.env, subprocess.PIPE)).returncode


def _probed(host: SandboxHost, probe: Program) -> subprocess.CompletedProcess[str]:
    view = msgspec.structs.replace(host.view([]), chdir="/") if host.isolated else None
    return host.run(probe, view, PROBE_TIMEOUT_S)


def _find_command(host: SandboxHost, program: str, files: Sequence[str]) -> None:
    environment = host.environment(host.home(host.work))
    done = _probed(host, Program(["/bin/bash", "-c", PROBE, "bash", program, *files], environment, subprocess.PIPE))
    found, _, missing = done.stdout.partition("\n")
    if found != "ready":
        raise SandboxError(NO_NAMESPACES.format(reason=done.stderr.strip()))
    if done.returncode == 0:
        return
    if done.returncode == NO_INTERPRETER:
        message = (
            f"{program} is run by {missing}, which is not in the sandbox: add the folder that it is installed in to readable"
        )
        raise ConfigError(
            message if host.isolated else f"{program} is run by {missing}, which does not exist", key="harness.command"
        )
    if done.returncode == NO_FILE:
        message = f"{missing} is not in the sandbox: add it, or the folder that it needs, to readable"
        raise ConfigError(message, key="harness.command")
    if "/" in program and os.path.isdir(program):
        raise ConfigError(f"{program} is a folder: name the program in it", key="harness.command")
    if "/" in program and os.path.isfile(program) and not os.access(program, os.X_OK):
        raise ConfigError(f"{program} may not be executed: chmod +x {program}", key="harness.command")
    outside = shutil.which(program, path=environment["PATH"]) or shutil.which(program)
    if outside is None:
        raise ConfigError(f"{program} does not exist (looked in {environment['PATH']})", key="harness.command")
    if not host.isolated:
        raise ConfigError(f"{program} is not in the PATH of harnesses: write {outside}", key="harness.command")
    raise ConfigError(
        f"{outside} exists on this machine, but not in the sandbox: write its absolute path as the command, and add its folder "
        'to readable, such as readable = ["/opt/my-agent"]',
        key="harness.command",
    )
