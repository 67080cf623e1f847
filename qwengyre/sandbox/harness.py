"""What one harness is given: its command, its environment, its files. The same for a cold and a warm start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from qwengyre.core.errors import SandboxError
from qwengyre.images.image import Image
from qwengyre.sandbox.host import SandboxHost, is_own_python
from qwengyre.sandbox.isolation import INSTRUCTION, RELAY_PORT, WORKSPACE
from qwengyre.sandbox.on_image import workspace_of
from qwengyre.sandbox.spaces import Space
from qwengyre.sandbox.task import Task

PATIENCE: Final = {
    "API_TIMEOUT_MS": "3600000",
    "API_FORCE_IDLE_TIMEOUT": "0",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
}
"""Keeps real harnesses waiting while their calls are held in a role change, and off the network otherwise."""


RESERVED: Final = frozenset(
    {
        "PWD",
        "OPENAI_BASE_URL",
        "OPENAI_API_BASE",
        "OPENAI_API_KEY",
        "OPENAI_MODEL",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_MODEL",
        "GOOGLE_GEMINI_BASE_URL",
        "GEMINI_API_KEY",
        "GEMINI_MODEL",
    }
)
"""Variables that every execution gets for itself: its address and key at the gateway."""


class GatewayAddress(msgspec.Struct, frozen=True):
    """Where harnesses reach the gateway. No control address: a harness must not learn one."""

    socket: str
    """Path of the Unix socket of the harness listener, in a folder of its own, which is mounted into sandboxes."""
    url: str = ""
    """`http://127.0.0.1:PORT` of the same listener over TCP; used only with `isolation = "none"`."""

    def check(self) -> None:
        """Raises SandboxError when the folder of the socket would show more than the socket."""
        folder, name = os.path.split(self.socket)
        if others := sorted(set(os.listdir(folder)) - {name}):
            raise SandboxError(f"the gateway's socket for harnesses needs a folder of its own: {folder} also holds {others[0]}")

    def open_to_sandboxes(self) -> None:
        """Let every user connect who can reach the folder: sandboxes of root are not root. What a client may do its key decides.

        A gateway that is started again does so itself.
        """
        for path, mode in ((os.path.dirname(self.socket), 0o711), (self.socket, 0o666)):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(path, mode)


class ExecutionSpec(msgspec.Struct, frozen=True):
    """One execution to run. An execution that is dispatched again has the same id and the next attempt."""

    execution: str
    task: Task
    key: str
    """The execution's own secret key at the gateway."""
    base_path: str = ""
    """The execution's own path at the gateway, such as `/x/e000012-3`; the endpoints are below it (`/v1/...`)."""
    model: str = "policy"
    attempt: int = 0
    gateway: int = 0
    """Number of the gateway that it calls."""

    def __repr__(self) -> str:
        return f"ExecutionSpec({self.execution}.{self.attempt}, task={self.task.name})"


class HarnessFiles(msgspec.Struct, frozen=True):
    """Host paths of one execution. Only `workspace` and `instruction` are ever mounted into its sandbox."""

    folder: Path
    space: Space

    def create(self, instruction: str) -> None:
        """Make the folder, which must not exist, and the space for the workspace. Raises OSError and SandboxError."""
        self.folder.mkdir(parents=True)
        (self.folder / "instruction.md").write_text(instruction, encoding="utf-8")
        self.space.make()

    @property
    def workspace(self) -> Path:
        """As this process reaches it."""
        return self.space.folder / "workspace"

    @property
    def is_apart(self) -> bool:
        """Whether the workspace is in no folder of the disk."""
        return self.space.seen != self.folder

    @property
    def shown_workspace(self) -> Path:
        """What is mounted into the sandbox."""
        return self.space.seen / "workspace"

    @property
    def instruction(self) -> Path:
        return self.folder / "instruction.md"

    @property
    def log(self) -> Path:
        """Standard output and error of the harness."""
        return self.folder / "harness.log"


class HarnessProcess(Protocol):
    """A running harness and everything that it started."""

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit code of the harness (128 + signal when killed), None at the timeout."""

    async def kill(self) -> int:
        """Kill everything in the sandbox and return once it is gone. Safe at any time, and after its end."""


def harness_command(host: SandboxHost, spec: ExecutionSpec, files: HarnessFiles) -> list[str]:
    """The configured command with its placeholders replaced; on an image, QwenGyre's own Python as it is there. Raises ImageError."""
    image = spec.task.image
    values = {
        "{instruction}": spec.task.instruction,
        "{instruction_file}": INSTRUCTION if host.isolated else str(files.instruction),
        "{workspace}": workspace_of(image, WORKSPACE) if host.isolated else str(files.workspace),
        "{model}": spec.model,
    }
    command = [_fill(part, values) for part in host.config.command]
    return on_image(host, image, command) if image and is_own_python(host.config) else command


def on_image(host: SandboxHost, image: Image, command: Sequence[str]) -> list[str]:
    """A command line that starts with QwenGyre's own Python, as an image has that. Raises ImageError."""
    own = host.config.env
    search = [folder for folder in own.get("PYTHONPATH", "").split(":") if folder]
    foreign = any(name.startswith("PYTHON") for name in image.env.keys() - own.keys())
    return host.own_python.harness(command, search, ignores_variables=foreign)


def _fill(part: str, values: dict[str, str]) -> str:
    """Replace placeholders once, left to right: text that was put in is not searched again."""
    pieces: list[str] = []
    rest = part
    while True:
        found = [(rest.find(name), name) for name in values if name in rest]
        if not found:
            return "".join([*pieces, rest])
        start, name = min(found)
        pieces += [rest[:start], values[name]]
        rest = rest[start + len(name) :]


def harness_environment(host: SandboxHost, gateway: GatewayAddress, spec: ExecutionSpec, files: HarnessFiles) -> dict[str, str]:
    """Every variable of the harness. Raises SandboxError when there is no address for a harness without isolation."""
    if not host.isolated and not gateway.url:
        raise SandboxError('isolation = "none" needs the gateway on a TCP port')
    image = spec.task.image
    base = (f"http://127.0.0.1:{RELAY_PORT}" if host.isolated else gateway.url.rstrip("/")) + spec.base_path
    address = {
        "PWD": workspace_of(image, WORKSPACE) if host.isolated else str(files.workspace),
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": spec.key,
        "OPENAI_MODEL": spec.model,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": spec.key,
        "ANTHROPIC_AUTH_TOKEN": spec.key,
        "ANTHROPIC_MODEL": spec.model,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": spec.key,
        "GEMINI_MODEL": spec.model,
    }
    return host.environment(host.home(files.folder, image), image) | PATIENCE | spec.task.agent_env | host.config.env | address
