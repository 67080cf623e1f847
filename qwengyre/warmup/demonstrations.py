"""Demonstrations: the reference harness itself, played by the demonstrator in a scratch folder."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qwengyre.sandbox.families.mini_repositories import (
    CHECK_COMMAND,
    MiniRepository,
    check_source,
    draw_task,
    split_pairs,
)
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.demonstrator import FULL_CONTEXT, Demonstrator
from qwengyre_harness.agent import Agent, Limits, Message, Reply

MAX_TURNS = 24


class Demonstration(msgspec.Struct, frozen=True):
    """One context of an execution, from its system prompt to its last reply."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass
class Recorder:
    """Stands between an agent and its model; `contexts` are the longest message lists, each with its last reply."""

    complete: Callable[[list[Message], list[dict[str, Any]]], Reply]
    contexts: list[Demonstration] = field(default_factory=list)

    def __call__(self, messages: list[Message], tools: list[dict[str, Any]]) -> Reply:
        reply = self.complete(messages, tools)
        shorter = [i for i, known in enumerate(self.contexts) if messages[: len(known.messages)] == known.messages]
        for index in reversed(shorter):
            del self.contexts[index]
        self.contexts.append(Demonstration([*messages, reply.message()], tools))
        return reply


class ScratchWorkspace:
    """A real folder whose self-test runs inside this process: the same files and outputs, without a process per call."""

    def __init__(self, root: Path, repository: MiniRepository):
        self.root = root
        self._check: dict[str, Any] = {"__name__": "check"}
        exec(compile(check_source(repository), "check.py", "exec"), self._check)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "run":
            return self.after_change() if str(arguments.get("command")).startswith(CHECK_COMMAND) else "error: not found"
        path = self.root / Path(str(arguments["path"])).name
        if name == "read_file":
            return path.read_text(encoding="utf-8") if path.exists() else f"error: no file {path.name}"
        path.write_text(str(arguments["content"]), encoding="utf-8")
        return self.after_change()

    def after_change(self) -> str:
        return str(self._check["report"](str(self.root)))


def demonstrate(config: WarmupConfig, seed: int) -> Iterator[list[Demonstration]]:
    """Yield the contexts of one execution after another, without end; tasks are drawn from the training pairs only."""
    rng = np.random.default_rng([seed, 3])
    pairs, _ = split_pairs(seed)
    limits = Limits(context_tokens=FULL_CONTEXT - 1, turns=MAX_TURNS, depth=1)
    with tempfile.TemporaryDirectory() as scratch:
        for index in itertools.count():
            repository = draw_task("demonstration", pairs, rng)
            root = Path(scratch) / str(index)
            root.mkdir()
            recorder = Recorder(Demonstrator(config, rng))
            Agent(recorder, ScratchWorkspace(root, repository), limits).work(repository.instruction)
            yield recorder.contexts
