"""Harnesses that `qwengyre init` knows: how each is started inside a sandbox, and where it lies on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

OWN: Final = "own"
"""The agent that `init` writes for the user to change."""


class StarterHarness(msgspec.Struct, frozen=True, kw_only=True):
    """One harness of others."""

    program: str
    """What it is called on a machine that has it."""
    arguments: tuple[str, ...]
    """After the program; with `shell`, a line for bash in which `"$0"` is the program and `"$1"` the instruction."""
    shell: bool = False
    """Whether it needs a shell first: some harnesses take the gateway's address from a file or an option only."""
    env: Mapping[str, str] = {}
    memory_mb: int = 1024
    """Of one execution. Node harnesses take more than the default."""
    context_tokens: int = 32_768
    """What its prompt, its tools' texts and some turns need."""
    install: str
    """What its makers say to type."""


CODEX: Final = (
    'exec "$0" exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model "$OPENAI_MODEL"'
    " -c model_provider=gateway -c model_providers.gateway.name=gateway -c model_providers.gateway.wire_api=responses"
    ' -c model_providers.gateway.env_key=OPENAI_API_KEY -c "model_providers.gateway.base_url=\'$OPENAI_BASE_URL\'" "$1"'
)
OPENCODE: Final = (
    'printf \'{"provider":{"gateway":{"npm":"@ai-sdk/openai-compatible","options":{"baseURL":"%s","apiKey":"%s"},'
    '"models":{"%s":{}}}},"permission":{"bash":"allow","edit":"allow"}}\' "$OPENAI_BASE_URL" "$OPENAI_API_KEY" "$OPENAI_MODEL"'
    ' > "$HOME/opencode.json" && OPENCODE_CONFIG="$HOME/opencode.json" exec "$0" run --model "gateway/$OPENAI_MODEL" "$1"'
)
HARNESSES: Final[Mapping[str, StarterHarness]] = {
    "claude-code": StarterHarness(
        program="claude",
        arguments=("-p", "{instruction}", "--model", "{model}", "--dangerously-skip-permissions"),
        env={"IS_SANDBOX": "1"},
        memory_mb=2048,
        context_tokens=65_536,
        install="npm install -g @anthropic-ai/claude-code",
    ),
    "codex": StarterHarness(
        program="codex",
        arguments=(CODEX,),
        shell=True,
        memory_mb=2048,
        context_tokens=65_536,
        install="npm install -g @openai/codex",
    ),
    "qwen-code": StarterHarness(
        program="qwen",
        arguments=("--yolo", "--auth-type", "openai", "-p", "{instruction}"),
        memory_mb=2048,
        context_tokens=65_536,
        install="npm install -g @qwen-code/qwen-code",
    ),
    "opencode": StarterHarness(
        program="opencode",
        arguments=(OPENCODE,),
        shell=True,
        memory_mb=2048,
        context_tokens=65_536,
        install="npm install -g opencode-ai",
    ),
    "mini-swe-agent": StarterHarness(
        program="mini",
        arguments=(
            *("--yolo", "--exit-immediately", "--cost-limit", "0", "--model", "openai/{model}"),
            *("--task", "{instruction}", "--output", "/tmp/trajectory.json"),
        ),
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        install="python3 -m venv ~/mini && ~/mini/bin/pip install mini-swe-agent",
    ),
}


class Installed(msgspec.Struct, frozen=True):
    """Where a program lies, and what a sandbox must show for it."""

    path: str
    readable: tuple[str, ...]


def find(program: str) -> Installed | None:
    """The program on this machine, or None. What lies below /usr is seen by every sandbox."""
    path = shutil.which(program)
    if path is None:
        return None
    path = os.path.abspath(path)
    shown = {
        found for found in (_package_of(Path(path)), _package_of(Path(path).resolve()), _interpreter_of(Path(path))) if found
    }
    return Installed(path, tuple(sorted(folder for folder in shown if not folder.startswith("/usr/"))))


def _package_of(file: Path) -> str:
    """The folder that a program was installed into: a virtual environment, the folder above `node_modules`, else the file itself."""
    for folder in file.parents:
        if folder.name == "node_modules":
            return str(folder)
        if (folder / "pyvenv.cfg").is_file():
            return str(folder)
    return str(file)


def _interpreter_of(file: Path) -> str:
    """The installation that runs a script of a virtual environment, or a script that starts with `#!/usr/bin/env node`."""
    for folder in file.parents:
        if (folder / "pyvenv.cfg").is_file():
            return str((folder / "bin" / "python").resolve().parents[1])
    with open(file, "rb") as opened:
        first = opened.readline(200)
    node = shutil.which("node") if first.startswith(b"#!") and first.rstrip().endswith(b"node") else None
    return str(Path(node).resolve()) if node else ""


def command_of(harness: StarterHarness, path: str) -> tuple[str, ...]:
    """The command line of a run file."""
    if harness.shell:
        return ("bash", "-c", *harness.arguments, path, "{instruction}")
    return (path, *harness.arguments)
