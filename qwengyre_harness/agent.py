"""The loop: ask the model, do what it calls for, compact a full context, delegate to a fresh one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from qwengyre_harness.tools import DELEGATE, TOOLS

Message = dict[str, Any]

MAIN_SYSTEM = "You are a coding agent. Work in the current folder with the tools. When the task is done, answer in one sentence."
SUB_SYSTEM = "You are a sub-agent. Do this one piece of work with the tools, then answer in one sentence."
SUMMARY_REQUEST = "Your context is full. Summarize what is done and what is left; you go on from the summary alone."
SUMMARY_HEAD = "\n\nSummary of the work so far:\n"


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True)
class Reply:
    content: str
    tool_calls: tuple[ToolCall, ...]
    num_tokens: int
    """Prompt and reply together, as the server counts them."""

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class Workspace(Protocol):
    """Where tools act; `tools.Folder` is the real one."""

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result as the model reads it, errors included. Raises KeyError for an unknown tool."""
        ...

    def after_change(self) -> str:
        """Output of the command that follows every change, empty if there is none."""
        ...


@dataclass(frozen=True)
class Limits:
    context_tokens: int
    """A context that has grown past this is summarized."""
    turns: int
    """Model calls of one agent, summaries included."""
    depth: int
    """How deep agents may delegate; 0 takes the tool away."""


@dataclass(frozen=True)
class Agent:
    complete: Callable[[list[Message], list[dict[str, Any]]], Reply]
    workspace: Workspace
    limits: Limits
    system: str = MAIN_SYSTEM

    def work(self, task: str) -> str:
        """Work until the model answers without calling a tool, or out of turns; return its last text."""
        messages, reply = self._fresh(task), Reply("", (), 0)
        turns = self.limits.turns
        while turns > 0:
            reply, turns = self.complete(messages, self._tools()), turns - 1
            if not reply.tool_calls:
                break
            messages.append(reply.message())
            messages.extend(self._result(call) for call in reply.tool_calls)
            if reply.num_tokens > self.limits.context_tokens and turns > 0:
                messages, turns = self._compact(messages, task), turns - 1
        return reply.content

    def _fresh(self, task: str) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": task}]

    def _tools(self) -> list[dict[str, Any]]:
        return [*TOOLS, DELEGATE] if self.limits.depth > 0 else list(TOOLS)

    def _compact(self, messages: list[Message], task: str) -> list[Message]:
        reply = self.complete([*messages, {"role": "user", "content": SUMMARY_REQUEST}], self._tools())
        return self._fresh(task + SUMMARY_HEAD + reply.content)

    def _result(self, call: ToolCall) -> Message:
        return {"role": "tool", "tool_call_id": call.call_id, "content": self._run(call)}

    def _run(self, call: ToolCall) -> str:
        try:
            arguments = json.loads(call.arguments or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are not JSON ({error})"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        if call.name == "delegate" and self.limits.depth > 0:
            return self._delegate(str(arguments.get("task", "")))
        try:
            return self.workspace.call(call.name, arguments)
        except KeyError:
            return f"error: there is no tool {call.name!r}"

    def _delegate(self, task: str) -> str:
        limits = replace(self.limits, depth=self.limits.depth - 1)
        answer = replace(self, limits=limits, system=SUB_SYSTEM).work(task)
        return "\n".join(part for part in (answer, self.workspace.after_change()) if part)
