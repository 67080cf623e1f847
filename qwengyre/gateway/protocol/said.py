"""What an answer says, put together from what its parser finds: trimmed texts, tool calls with their arguments as they come."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from qwengyre.gateway.protocol.deltas import Delta, ReasoningDelta, TextDelta, ToolArguments, ToolStart
from qwengyre.gateway.protocol.text import Trim

NewToolId = Callable[[int], str]
"""The id of an answer's tool call, by its index."""


class Said:
    """Collects deltas until they are taken. Calls are told one after the other: `call`, `arguments` ..., then the next."""

    def __init__(self, new_tool_id: NewToolId, *, text: Trim, reasoning: Trim):
        self._new_tool_id, self._trimmed_text, self._trimmed_reasoning = new_tool_id, text, reasoning
        self._deltas: list[Delta] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._has_text = False
        self.cut_off = ""
        """What was written of the last call's arguments and is not told, as the call would look whole: its last braces."""
        self.num_calls = 0
        self.num_blocks = 0
        """Calls, and what should have been some."""

    @property
    def content(self) -> str:
        """The text so far, without blocks that are shown."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def take(self) -> list[Delta]:
        """What was not taken yet."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def think(self, text: str) -> None:
        self.add_reasoning(self._trimmed_reasoning.push(text))

    def say(self, text: str) -> None:
        self.add_content(self._trimmed_text.push(text))

    def add_reasoning(self, text: str) -> None:
        """As it is, beside the trimming."""
        if text:
            self._reasoning.append(text)
            self._deltas.append(ReasoningDelta(text=text))

    def add_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._add_text(text)

    def show(self, block: str) -> None:
        """What should have been a call and is not one: as text, so that the harness can object."""
        self.num_blocks += 1
        self._add_text(f"\n{block}" if self._has_text else block)

    def call(self, name: str) -> None:
        self._deltas.append(ToolStart(index=self.num_calls, id=self._new_tool_id(self.num_calls), name=name))
        self.num_calls += 1
        self.num_blocks += 1

    def arguments(self, text: str) -> None:
        """More of the arguments' JSON text of the last call."""
        if text:
            self._deltas.append(ToolArguments(index=self.num_calls - 1, text=text))

    def _add_text(self, text: str) -> None:
        if text:
            self._has_text = True
            self._deltas.append(TextDelta(text=text))


def json_text(value: object) -> str:
    """JSON that any encoding can carry: half a surrogate pair stays an escape.

    >>> json_text({"a": "\\u00e9"}), json_text("\\ud83d")
    ('{"a": "\u00e9"}', '"\\\\ud83d"')
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


def value_of(text: str) -> object:
    """What text without quotes means where no string was declared: the JSON value that it is, else the text itself.

    >>> value_of("[1, 2]"), value_of("True"), value_of("NaN")
    ([1, 2], 'True', 'NaN')
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or nested too deeply
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value
