"""The tools: what the model is told of them, and the folder they act on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in parameters}, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("write_file", "Write a file.", "path", "content"),
    _tool("read_file", "Read a file.", "path"),
    _tool("run", "Run a shell command.", "command"),
)
DELEGATE = _tool("delegate", "Give one piece of work to a sub-agent that knows only what you tell it.", "task")


@dataclass(frozen=True)
class Folder:
    """The real workspace. Paths that lead out of `root` are refused; what commands do is the sandbox's business."""

    root: Path
    change_command: str
    """Run after every file written, its output is shown with the result; empty for none."""
    command_timeout_s: float
    max_output_chars: int

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        tools: dict[str, Callable[..., str]] = {"write_file": self._write, "read_file": self._read, "run": self._run}
        try:
            return self._cut(tools[name](**{key: str(value) for key, value in arguments.items()}))
        except TypeError:
            return f"error: wrong arguments for {name}: {', '.join(arguments) or 'none'}"
        except (OSError, UnicodeError, ValueError) as error:
            return f"error: {error}"

    def after_change(self) -> str:
        return self._cut(self._run(self.change_command)) if self.change_command else ""

    def _write(self, path: str, content: str) -> str:
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
        return self.after_change() or f"wrote {path}"

    def _read(self, path: str) -> str:
        return self._inside(path).read_text(encoding="utf-8")

    def _run(self, command: str) -> str:
        process = subprocess.Popen(
            command, shell=True, cwd=self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self.command_timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return f"{output}\nerror: stopped after {self.command_timeout_s:g} s"
        return output.strip() + (f"\nexit code {process.returncode}" if process.returncode else "")

    def _inside(self, path: str) -> Path:
        target = (self.root / path).resolve()
        if not target.is_relative_to(self.root.resolve()):
            raise ValueError(f"{path} is outside the workspace")
        return target

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_output_chars:
            return text
        half = self.max_output_chars // 2
        return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
