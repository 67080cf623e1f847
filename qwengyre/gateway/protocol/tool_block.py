"""Tool calls in JSON, `{"name": ..., "arguments": {...}}` or the arguments alone, read while they are written."""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from qwengyre.gateway.protocol.said import Said, json_text

JSON_WHITE: Final = " \t\n\r"
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


class CallForm:
    """Under which keys a format has a call's name and its arguments.

    >>> form = CallForm("arguments")
    >>> form.read('{"arguments": {"a": 1}, "name": "f"}')
    WholeCall(name='f', arguments='{"a": 1}', is_valid=True)
    >>> form.read('{"name": "f", "arguments": {"a": ')
    WholeCall(name='f', arguments='{"a":', is_valid=False)
    """

    def __init__(self, arguments: str, white: str | None = None):
        """`white` are the characters that may stand around the object: all white space, or these."""
        self._key, self._white = arguments, white
        self._head = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"' + arguments + r'"\s*:\s*(?=\{)')

    def begin(self, body: str) -> tuple[str, int] | None:
        """The name, and where the arguments begin, of a block that begins the usual way."""
        head = self._head.match(body)
        name = _json_string(head.group(1)) if head else None
        return (name, head.end()) if head and name else None

    def read(self, body: str) -> WholeCall:
        """Read a finished block."""
        body = body.strip(self._white)
        begun = self.begin(body)
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or nested too deeply
            return WholeCall(name=begun[0] if begun else None, arguments=body[begun[1] :] if begun else body, is_valid=False)
        name = parsed.get("name") if isinstance(parsed, dict) else None
        if not isinstance(name, str) or not name:
            return WholeCall(name=None, arguments=body, is_valid=False)
        arguments = parsed.get(self._key, {})
        if begun and begun[0] == name:
            end = ValueScanner().push(body[begun[1] :])
            text = body[begun[1] : begun[1] + end]
            if _loads(text) == arguments:
                return WholeCall(name=name, arguments=text, is_valid=True)
        return WholeCall(name=name, arguments=arguments if isinstance(arguments, str) else json_text(arguments), is_valid=True)


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


class RawArguments:
    """Arguments that the policy writes as JSON: told as they come, but for the last brace, which waits until the call is whole."""

    def __init__(self, said: Said, white: str | None = None):
        """`white` are the characters that do not count around them: all white space, or these."""
        self._said, self._scanner, self._white = said, ValueScanner(), white
        self._begun = False
        self._num_told = 0
        self.whole = ""
        """All that was pushed, from its first character that is not white."""

    def push(self, piece: str) -> None:
        self.whole += piece if self._begun else piece.lstrip(self._white)
        if not self._begun and self.whole:
            self._begun, piece = True, self.whole
        if not self.whole.startswith("{") or self._scanner.ended:
            return
        num_told = self._num_told + self._scanner.push(piece) - self._scanner.ended
        self._tell(num_told)

    def end(self, text: str | None) -> None:
        """`text` is what the arguments are after all; None for a call that is broken, which keeps its last brace."""
        if text is None:
            self._said.cut_off = self.whole[self._num_told :].rstrip(self._white)
        elif text.startswith(self.whole[: self._num_told]):
            self._said.arguments(text[self._num_told :])

    def close(self, *, is_closed: bool) -> None:
        """The end of what was all arguments, or should have been."""
        text = self.whole.rstrip(self._white)
        self.end(text if is_json(text) and is_closed else broken(text) if is_closed else None)

    def _tell(self, num_chars: int) -> None:
        self._said.arguments(self.whole[self._num_told : num_chars])
        self._num_told = num_chars


class JsonCall:
    """A whole call in one JSON object. The name and the arguments are told as they come, where it begins the usual way."""

    may_end = True

    def __init__(self, said: Said, form: CallForm):
        self._said, self._form = said, form
        self._body = ""
        self._name = ""
        self._is_usual = True
        self._arguments: RawArguments | None = None

    def text(self, piece: str) -> None:
        if self._arguments is not None:
            self._body += piece
            self._arguments.push(piece)
            return
        self._body += piece
        if not self._is_usual:
            return
        begun = self._form.begin(self._body)
        if begun is None:
            self._is_usual = len(self._body) < _HEAD_CHARS
            return
        self._name = begun[0]
        self._said.call(self._name)
        self._arguments = RawArguments(self._said)
        self._arguments.push(self._body[begun[1] :])

    def mark(self, token: int, piece: str) -> None:
        self.text(piece)

    def finish(self, *, closed: bool) -> str | None:
        whole = self._form.read(self._body)
        if self._arguments is not None:
            is_valid = closed and whole.is_valid and whole.name == self._name
            self._arguments.end(whole.arguments if is_valid else broken(self._arguments.whole) if closed else None)
            return None
        if whole.name is None or not (whole.is_valid and closed):
            return self._body.strip()
        self._said.call(whole.name)
        self._said.arguments(whole.arguments)
        return None


def broken(arguments: str) -> str | None:
    """Arguments of a broken call as the policy wrote them; None where they are whole: the call must not look whole, too."""
    text = arguments.rstrip()
    return None if is_json(text) else text


_NO_JSON: Final = object()


def is_json(text: str) -> bool:
    return _loads(text) is not _NO_JSON


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _json_string(text: str) -> str | None:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, str) else None
