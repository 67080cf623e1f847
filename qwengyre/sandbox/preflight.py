"""Prove, before anything is dispatched, that a harness can be started here; say what to change when it cannot."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError, SandboxError
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.isolation import bwrap_arguments

PROBE_TIMEOUT_S: Final = 60.0
NOT_FOUND, NO_INTERPRETER = 3, 4
PROBE: Final = f"""printf ready
program=$(command -v -- "$1") || exit {NOT_FOUND}
IFS= read -r -n 500 line < "$program"
case $line in "#!"*) set -- ${{line#??}}; [ -x "$1" ] || {{ printf "\\n%s" "$1"; exit {NO_INTERPRETER}; }};; esac
exit 0
"""
"""Finds the command, and the interpreter that its first line names: a script without one fails as if it were not there."""
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
            _find_command(host, config.command[0])
        finally:
            host.close()


def _find_command(host: SandboxHost, program: str) -> None:
    environment = host.environment(host.home(host.work))
    script = ["/bin/bash", "-c", PROBE, "bash", program]
    view = msgspec.structs.replace(host.view([]), chdir="/")
    arguments = bwrap_arguments(host.bwrap, view) if host.isolated else []
    done = subprocess.run(
        [*arguments, *script], env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    found, _, interpreter = done.stdout.partition("\n")
    if found != "ready":
        raise SandboxError(NO_NAMESPACES.format(reason=done.stderr.strip()))
    if done.returncode == 0:
        return
    if done.returncode == NO_INTERPRETER:
        message = (
            f"{program} is run by {interpreter}, which is not in the sandbox: add the folder that it is installed in to readable"
        )
        raise ConfigError(
            message if host.isolated else f"{program} is run by {interpreter}, which does not exist", key="harness.command"
        )
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
