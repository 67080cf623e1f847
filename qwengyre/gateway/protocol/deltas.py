"""What an answer is made of while it streams, the same for every dialect."""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.trajectory.match import ToolUse, Turn


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True, gc=False):
    text: str


class TextDelta(msgspec.Struct, frozen=True, tag=True, gc=False):
    text: str


class ToolStart(msgspec.Struct, frozen=True, tag=True, gc=False):
    index: int
    """Tool calls of one answer are numbered from 0."""
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, tag=True, gc=False):
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


class Block(msgspec.Struct, frozen=True):
    """A part of an answer, in the order in which it was said."""

    kind: Literal["reasoning", "text", "tool"]
    text: str = ""
    use: ToolUse | None = None
    """Of a tool block."""


class AnswerSoFar:
    """Adds deltas up to the message that the client has seen."""

    __slots__ = ("_blocks", "_tools")

    def __init__(self) -> None:
        self._blocks: list[tuple[Literal["reasoning", "text", "tool"], list[str], ToolStart | None]] = []
        self._tools: list[list[str]] = []

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta():
                self._say("text", delta.text)
            case ReasoningDelta():
                self._say("reasoning", delta.text)
            case ToolStart():
                self._tools.append([])
                self._blocks.append(("tool", self._tools[-1], delta))
            case ToolArguments():
                self._tools[delta.index].append(delta.text)

    @property
    def num_tools(self) -> int:
        return len(self._tools)

    def blocks(self) -> tuple[Block, ...]:
        return tuple(
            Block(kind, use=ToolUse(id=start.id, name=start.name, arguments="".join(parts)))
            if start is not None
            else Block(kind, text="".join(parts))
            for kind, parts, start in self._blocks
        )

    def turn(self) -> Turn:
        blocks = self.blocks()
        reasoning = "".join(block.text for block in blocks if block.kind == "reasoning")
        return Turn(
            role="assistant",
            text="".join(block.text for block in blocks if block.kind == "text"),
            reasoning=reasoning or None,
            tool_uses=tuple(block.use for block in blocks if block.use is not None),
        )

    def _say(self, kind: Literal["reasoning", "text"], text: str) -> None:
        if not self._blocks or self._blocks[-1][0] != kind:
            self._blocks.append((kind, [], None))
        self._blocks[-1][1].append(text)
