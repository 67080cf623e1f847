"""Start a harness as any command: a new sandbox, the small supervisor of `inside.py` in it, the command below that."""

from __future__ import annotations

import os

from qwengyre.images.image import Image
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress, HarnessFiles, harness_command, harness_environment
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.isolation import INSTRUCTION, WORKSPACE, Mount, SandboxView
from qwengyre.sandbox.on_image import workspace_of
from qwengyre.sandbox.process import Process, Program
from qwengyre.sandbox.room import Room


def start_cold(host: SandboxHost, gateway: GatewayAddress, spec: ExecutionSpec, files: HarnessFiles, room: Room) -> Process:
    """Start the harness of `spec`. Raises OSError and SandboxError."""
    command = harness_command(host, spec, files)
    view = harness_view(host, gateway, files, spec.task.image) if host.isolated else None
    cwd = view.chdir if view else str(files.workspace)
    program = Program(command, harness_environment(host, gateway, spec, files), room.output)
    return host.start_supervised(program, room, view, cwd=cwd, stdin=harness_input(host, files))


def harness_view(host: SandboxHost, gateway: GatewayAddress, files: HarnessFiles, image: Image | None = None) -> SandboxView:
    """What the sandbox of a harness sees: its workspace and instruction, and the gateway's harness listener."""
    workspace = Mount(str(files.shown_workspace), workspace_of(image, WORKSPACE), writable=True)
    return host.view([workspace, Mount(str(files.instruction), INSTRUCTION)], gateway.socket, image)


def harness_input(host: SandboxHost, files: HarnessFiles) -> str:
    """What is opened as standard input, in the sandbox: a descriptor from outside would carry the rights of its mount there."""
    if not host.config.stdin:
        return os.devnull
    return INSTRUCTION if host.isolated else str(files.instruction)
