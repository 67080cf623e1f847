"""Readers of tool calls, one block at a time, while it is written.

A reader is given the text of a block, and the control tokens in it. It tells the call's name as soon as it is certain, and its
arguments as JSON as they come. A call that turns out to be broken shows it: its arguments never become valid JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from qwengyre.gateway.protocol.said import Said, json_text, value_of
from qwengyre.gateway.protocol.text import Trimmed

IsString = Callable[[str, str], bool]
"""Whether a tool declares a parameter as a string: (tool, parameter)."""
HELD_CHARS = 256
"""A string that is not closed in its block is not an argument. It is told once it has closed, or has grown longer than this: then the
harness sees it come, and should it never close, the call is broken."""


class CallReader(Protocol):
    may_end: bool
    """The block's end is one now; before, it is text."""

    def text(self, piece: str) -> None: ...

    def mark(self, token: int, piece: str) -> None:
        """A control token inside the block; `piece` is its text."""

    def finish(self, *, closed: bool) -> str | None:
        """The block has ended. The block's text when there was no call in it that can be told."""


NewReader = Callable[[Said, IsString], CallReader]


class ArgumentsWriter:
    """Arguments that come one by one, as one JSON object."""

    def __init__(self, said: Said):
        self._said = said
        self._is_first = True
        self._name, self._string, self._held = "", Trimmed(), ""
        """Of the string that was begun last."""
        self._is_streaming = False

    def begin(self, name: str) -> None:
        self._said.call(name)
        self._said.arguments("{")
        self._is_first, self._is_streaming = True, False

    def add(self, key: str, value: object) -> None:
        self._said.arguments(self._key(key) + json_text(value))

    def begin_string(self, key: str, trim: Trimmed) -> None:
        self._name, self._string, self._held, self._is_streaming = key, trim, "", False

    def more(self, piece: str) -> None:
        """More of the string that was begun."""
        text = self._string.push(piece)
        if not self._is_streaming:
            self._held += text
            if len(self._held) <= HELD_CHARS:
                return
            text, self._is_streaming = self._held, True
            self._said.arguments(self._key(self._name) + '"')
        self._said.arguments(json_text(text)[1:-1])

    def end_string(self) -> None:
        if self._is_streaming:
            self._said.arguments('"')
        else:
            self.add(self._name, self._held)
        self._is_streaming = False

    def end(self, *, is_valid: bool) -> None:
        """The call is whole. A string that never closed is left out if nothing of it was told."""
        if is_valid and not self._is_streaming:
            self._said.arguments("}")

    def _key(self, key: str) -> str:
        before, self._is_first = "" if self._is_first else ", ", False
        return f"{before}{json_text(key)}: "


class Argument:
    """One argument's value, while it comes: a declared string at once, anything else when it is whole."""

    def __init__(self, writer: ArgumentsWriter, key: str, *, is_string: bool, trim: Trimmed):
        self._writer, self._key, self._is_string, self._trim = writer, key, is_string, trim
        self._whole = ""
        if is_string:
            writer.begin_string(key, trim)

    def push(self, piece: str) -> None:
        if self._is_string:
            self._writer.more(piece)
        else:
            self._whole += self._trim.push(piece)

    def close(self) -> None:
        if self._is_string:
            self._writer.end_string()
        else:
            self._writer.add(self._key, value_of(self._whole))
