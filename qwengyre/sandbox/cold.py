"""Start a harness as any command: a new sandbox, the small supervisor of `inside.py` in it, the command below that."""

from __future__ import annotations

import os
from pathlib import Path

from qwengyre.sandbox.harness import ExecutionSpec, Gateway, HarnessFiles, harness_command, harness_environment
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.isolation import INSTRUCTION, WORKSPACE, Mount, View
from qwengyre.sandbox.process import Process, Program


def start_cold(host: SandboxHost, gateway: Gateway, spec: ExecutionSpec, files: HarnessFiles, fds: list[int]) -> Process:
    """Start the harness of `spec`; `fds` join its cgroup. Raises OSError and SandboxError."""
    command = harness_command(host, spec, files)
    view = harness_view(host, gateway, files) if host.isolated else None
    cwd = WORKSPACE if host.isolated else str(files.workspace)
    environment = harness_environment(host, gateway, spec, files)
    output, stdin = open_output(files.log), open_input(host, files)
    try:
        return host.start_supervised(Program(command, environment, output, stdin=stdin, pass_fds=fds), view, cwd)
    finally:
        os.close(output)
        os.close(stdin)


def harness_view(host: SandboxHost, gateway: Gateway, files: HarnessFiles) -> View:
    """What the sandbox of a harness sees: its workspace and instruction, and the gateway's harness listener."""
    own = [Mount(str(files.workspace), WORKSPACE, writable=True), Mount(str(files.instruction), INSTRUCTION)]
    return host.view(own, gateway.socket)


def open_output(log: Path) -> int:
    return os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)


def open_input(host: SandboxHost, files: HarnessFiles) -> int:
    return os.open(files.instruction if host.config.stdin else os.devnull, os.O_RDONLY | os.O_CLOEXEC)
