"""One tool call in JSON, `{"name": ..., "arguments": {...}}`, read while it is written."""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=\{)')
_HEAD_CHARS: Final = 400
"""A block that has not begun the usual way within this many characters is read at its end."""
_MARKS: Final = re.compile(r'["\\{}\[\]]')


class WholeCall(msgspec.Struct, frozen=True):
    """A tool call as the block said it. `name` is None where there is no callable call in it."""

    name: str | None
    arguments: str
    """JSON text."""
    is_valid: bool
    """The block is what the template asks for."""


def read_block(body: str) -> WholeCall:
    """Read a finished block.

    >>> read_block('{"arguments": {"a": 1}, "name": "f"}')
    WholeCall(name='f', arguments='{"a": 1}', is_valid=True)
    >>> read_block('{"name": "f", "arguments": {"a": ')
    WholeCall(name='f', arguments='{"a":', is_valid=False)
    """
    body = body.strip()
    head = _HEAD.match(body)
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or nested too deeply
        name = _name_of(head) if head else None
        return WholeCall(name=name, arguments=body[head.end() :] if head else body, is_valid=False)
    name = parsed.get("name") if isinstance(parsed, dict) else None
    if not isinstance(name, str) or not name:
        return WholeCall(name=None, arguments=body, is_valid=False)
    if head and _name_of(head) == name:
        scanner = ValueScanner()
        end = scanner.push(body[head.end() :])
        return WholeCall(name=name, arguments=body[head.end() : head.end() + end], is_valid=True)
    arguments = parsed.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return WholeCall(name=name, arguments=text, is_valid=True)


class ValueScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    __slots__ = ("_depth", "_escaped", "_in_string", "ended")

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped, self.ended = 0, False, False, False

    def push(self, piece: str) -> int:
        """How many characters of `piece` belong to the value."""
        if self.ended:
            return 0
        start = 0
        if self._escaped and piece:
            self._escaped, start = False, 1
        while (found := _MARKS.search(piece, start)) is not None:
            mark, start = found.group(), found.end()
            if mark == "\\":
                if self._in_string:
                    self._escaped = start >= len(piece)
                    start += 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    self.ended = True
                    return start
        return len(piece)


class ToolBlock:
    """Reads a block piece by piece: the name as soon as it is certain, then the arguments as they come."""

    def __init__(self) -> None:
        self.body = ""
        self.name: str | None = None
        """Known once the block began the usual way; None means: wait for the end."""
        self._scanner = ValueScanner()
        self._sent_to = 0
        self._is_usual = True

    def push(self, piece: str) -> str:
        """Return the arguments' text that is certain now."""
        self.body += piece
        if self.name is None and (not self._is_usual or not self._begin()):
            return ""
        new = self.body[self._sent_to :]
        taken = new[: self._scanner.push(new)]
        if self._scanner.ended or taken == new:
            self._sent_to += len(taken)
        return taken

    def finish(self) -> WholeCall:
        """The call as it is said to the client, now that the block has ended."""
        return read_block(self.body)

    def rest(self, whole: WholeCall) -> str:
        """The arguments' text that has not been returned by `push`, given `finish`.

        A block that turns out to be invalid shows it: all that stands behind the arguments is passed on.
        """
        return "" if whole.is_valid else self.body[self._sent_to :].rstrip()

    def _begin(self) -> bool:
        head = _HEAD.match(self.body)
        if head is None:
            self._is_usual = len(self.body) < _HEAD_CHARS
            return False
        self.name, self._sent_to = _name_of(head), head.end()
        if self.name is None:
            self._is_usual = False
        return self.name is not None


def _name_of(head: re.Match[str]) -> str | None:
    try:
        return json.loads(head.group(1)) or None
    except json.JSONDecodeError:
        return None
