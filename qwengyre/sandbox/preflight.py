"""Prove, before anything is dispatched, that a harness can be started here; say what to change when it cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError, SandboxError
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.process import Program, run

PROBE_TIMEOUT_S: Final = 60.0
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
INTERPRETER: Final = re.compile(r"(.*/)?(python[\d.]*|bash|sh|node|ruby|perl)")
OWN_IN_THE_SANDBOX: Final = ("/tmp/", "/dev/", "/workspace", "/app", "/logs", "/tests", "/proc/", "/run/", "/var/tmp/")
"""What lies there is the sandbox's own, whatever this machine has there."""
NO_NAMESPACES: Final = (
    "bubblewrap cannot make a sandbox on this machine: {reason}\nUser namespaces may be off (sysctl kernel.unprivileged_userns_clone=1, "
    "or kernel.apparmor_restrict_unprivileged_userns=0), or this is a container that forbids them (docker run --security-opt "
    'seccomp=unconfined --security-opt systempaths=unconfined). isolation = "none" in [harness] does without, for a trusted harness'
)


def check_harness(config: HarnessConfig) -> None:
    """Start a sandbox and look for the harness command in it.

    Raises SandboxError when isolation cannot be given, and ConfigError when the command does not exist or cannot be seen.
    """
    for path in config.readable:
        if not Path(path).exists():
            raise ConfigError(f"{path} does not exist", key="harness.readable")
    with tempfile.TemporaryDirectory(prefix="qwengyre-check-") as work:
        host = SandboxHost(config, Path(work))
        try:
            _find_command(host, config.command[0], _files(config.command))
        finally:
            host.close()


def _files(command: Sequence[str]) -> list[str]:
    """Files of this machine that the command names. Raises ConfigError for a script that harnesses would look for in their workspace."""
    files = [
        word for word in command[1:] if word.startswith("/") and not word.startswith(OWN_IN_THE_SANDBOX) and os.path.exists(word)
    ]
    if len(command) > 1 and INTERPRETER.fullmatch(command[0]) and os.path.isfile(command[1]):
        if not os.path.isabs(command[1]):
            message = f"a harness starts in its own workspace, where {command[1]} is not: write {os.path.abspath(command[1])}"
            raise ConfigError(message, key="harness.command")
        files.append(command[1])
    return files


def _find_command(host: SandboxHost, program: str, files: Sequence[str]) -> None:
    environment = host.environment(host.home(host.work))
    probe = Program(["/bin/bash", "-c", PROBE, "bash", program, *files], environment, subprocess.PIPE)
    if host.isolated:
        probe = host.sandboxed(msgspec.structs.replace(host.view([]), chdir="/"), probe)
    done = run(probe, PROBE_TIMEOUT_S)
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
