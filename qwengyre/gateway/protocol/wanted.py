"""What of an answer its client wants: nothing from a stop string on, one tool call, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from qwengyre.gateway.protocol.deltas import Delta, TextDelta, ToolArguments, ToolStart
from qwengyre.gateway.protocol.request import CallLimit
from qwengyre.gateway.protocol.sse import encode
from qwengyre.gateway.protocol.text import StopStrings


class _Parser(Protocol):
    def feed(self, token_ids: Sequence[int]) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...
    @property
    def cut_off(self) -> str: ...


class Wanted:
    """Lets deltas through as far as they are wanted."""

    def __init__(self, stops: Sequence[str], calls: CallLimit):
        self._stops = StopStrings(stops)
        self._has_one_call = calls is CallLimit.ONE
        self._wants_all = not any(stops) and not self._has_one_call
        self._is_past_calls = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    @property
    def is_over(self) -> bool:
        """Nothing that follows is wanted."""
        return self._is_past_calls or self._stops.found is not None

    def take(self, deltas: Sequence[Delta]) -> list[Delta]:
        if self._wants_all:
            return list(deltas)
        wanted: list[Delta] = []
        for delta in deltas:
            if self.is_over:
                break
            if text := self._stops.push(delta.text) if isinstance(delta, TextDelta) else self._stops.flush():
                wanted.append(TextDelta(text=text))
            if self._has_one_call and isinstance(delta, ToolStart) and delta.index:
                self._is_past_calls = True
            elif not isinstance(
                delta, TextDelta
            ):  # the text before it has ended: what was held back did not become a stop string
                wanted.append(delta)
        return wanted

    def finish(self) -> list[Delta]:
        """What was held back and did not become a stop string."""
        held = self._stops.flush()
        return [TextDelta(text=held)] if held else []


class CallsAsText:
    """A parser of an answer in which the client wants no calls: what the policy calls all the same is text, written as in Qwen's format.

    A call stands on lines of its own. The parser inside sees no text in a call, so it puts no line break between one and the text
    after it, which may be a call that was cut before its name: the break is put here.
    """

    def __init__(self, parser: _Parser):
        self._parser = parser
        self._has_text = self._is_in_call = self._is_behind_call = False
        """The last is true from a call's end until text follows it."""
        self._arguments: list[str] = []
        """Of the last call."""

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        return [text for delta in self._parser.feed(token_ids) for text in self._text(delta)]

    cut_off = ""
    """Nothing: as text a call that was cut is told to its last brace."""

    def finish(self) -> list[Delta]:
        """A call that was cut stays open: what follows a cut was never written."""
        last = [text for delta in self._parser.finish() for text in self._text(delta)]
        if _is_json("".join(self._arguments)):
            return [*last, *self._end_of_call()]
        rest = self._parser.cut_off if self._is_in_call else ""
        return [*last, TextDelta(text=rest)] if rest else last

    def _text(self, delta: Delta) -> list[Delta]:
        match delta:
            case ToolArguments():
                self._arguments.append(delta.text)
                return [TextDelta(text=delta.text)]
            case ToolStart():
                ended = self._end_of_call()
                opening = "\n<tool_call>\n" if self._has_text else "<tool_call>\n"
                self._is_in_call = self._has_text = True
                self._is_behind_call = False
                self._arguments.clear()
                return [*ended, TextDelta(text=f'{opening}{{"name": {encode(delta.name).decode()}, "arguments": ')]
            case TextDelta():
                ended = self._end_of_call()
                needs_break = self._is_behind_call and not delta.text.startswith("\n")
                self._has_text, self._is_behind_call = True, False
                return [*ended, TextDelta(text=f"\n{delta.text}") if needs_break else delta]
            case _:
                return [*self._end_of_call(), delta]

    def _end_of_call(self) -> list[Delta]:
        if not self._is_in_call:
            return []
        self._is_in_call, self._is_behind_call = False, True
        return [TextDelta(text="}\n</tool_call>")]


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
