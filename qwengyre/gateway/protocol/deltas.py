"""What an answer is made of while it streams, the same for every dialect."""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.trajectory.match import ToolUse, Turn


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True):
    text: str


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    text: str


class ToolStart(msgspec.Struct, frozen=True, tag=True):
    index: int
    """Tool calls of one answer are numbered from 0."""
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, tag=True):
    """More of the arguments' JSON text, exactly as the policy writes it."""

    index: int
    text: str


Delta = ReasoningDelta | TextDelta | ToolStart | ToolArguments

EndReason = Literal["stop", "length", "tool_calls"]


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


class Ending(msgspec.Struct, frozen=True):
    """How an answer ended, as the client is told."""

    reason: EndReason
    usage: Usage
    stop_string: str | None = None


class AnswerSoFar:
    """Adds deltas up to the message that the client has seen."""

    __slots__ = ("_arguments", "_reasoning", "_text", "_tools")

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._tools: list[ToolStart] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta():
                self._text.append(delta.text)
            case ReasoningDelta():
                self._reasoning.append(delta.text)
            case ToolStart():
                self._tools.append(delta)
                self._arguments.append([])
            case ToolArguments():
                self._arguments[delta.index].append(delta.text)

    @property
    def num_tools(self) -> int:
        return len(self._tools)

    def turn(self) -> Turn:
        uses = (
            ToolUse(id=tool.id, name=tool.name, arguments="".join(arguments))
            for tool, arguments in zip(self._tools, self._arguments, strict=True)
        )
        reasoning = "".join(self._reasoning)
        return Turn(role="assistant", text="".join(self._text), reasoning=reasoning or None, tool_uses=tuple(uses))
