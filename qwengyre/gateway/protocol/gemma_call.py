"""Gemma 4's tool calls, `call:NAME{key:<|"|>text<|"|>,n:1,list:[...]}`, put into JSON while they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qwengyre.gateway.protocol.said import Said, json_text, value_of
from qwengyre.gateway.protocol.text import may_begin

QUOTE: Final = '<|"|>'
_PREFIX: Final = "call:"
_KEY_ENDS: Final = ":,{}[]"
_LITERAL_ENDS: Final = ",}]"


class _NeedMore(Exception):
    """What was written so far does not decide."""


class _Malformed(Exception):
    """Not in Gemma's syntax."""


class GemmaCall:
    may_end = True

    def __init__(self, said: Said):
        self._said = said
        self._body = ""
        self._at = 0
        self._name = ""
        self._open: list[str] = []
        """Closers of the objects and lists that are open, the outermost first."""
        self._expects = self._head
        self._is_done = self._is_broken = False

    def text(self, piece: str) -> None:
        self._body += piece
        try:
            while not (self._is_done or self._is_broken):
                self._expects()
        except _NeedMore:
            return
        except _Malformed:
            self._is_broken = True

    def mark(self, token: int, piece: str) -> None:
        self.text(piece)

    def finish(self, *, closed: bool) -> str | None:
        if not self._name:
            return self._body.strip()
        if closed and self._is_done and not self._is_broken and not self._body[self._at :].strip():
            self._said.arguments("}")
        return None

    def _head(self) -> None:
        at = self._body.find("{")
        if at < 0:
            raise _NeedMore
        head = self._body[:at].lstrip()
        name = head[len(_PREFIX) :].strip()
        if not head.startswith(_PREFIX) or not name:
            raise _Malformed
        self._name, self._at = name, at
        self._said.call(name)
        self._value()

    def _value(self) -> None:
        if self._peek_quote():
            self._said.arguments('"')
            self._expects = self._string
            return
        match self._peek():
            case "{":
                self._enter("{", "}", self._first_key)
            case "[":
                self._enter("[", "]", self._first_item)
            case _:
                self._said.arguments(json_text(value_of(self._upto(_LITERAL_ENDS))))
                self._expects = self._after_value

    def _enter(self, opener: str, closer: str, expects: Callable[[], None]) -> None:
        self._open.append(closer)
        self._said.arguments(opener)
        self._at += 1
        self._expects = expects

    def _first_key(self) -> None:
        if self._peek() == "}":
            self._close()
        else:
            self._key()

    def _first_item(self) -> None:
        if self._peek() == "]":
            self._close()
        else:
            self._value()

    def _key(self) -> None:
        self._skip_space()
        if self._peek_quote():
            end = self._body.find(QUOTE, self._at)
            if end < 0:
                self._at -= len(QUOTE)
                raise _NeedMore
            key, self._at = self._body[self._at : end], end + len(QUOTE)
        else:
            key = self._upto(_KEY_ENDS)
        self._said.arguments(json_text(key))
        self._expects = self._colon

    def _colon(self) -> None:
        if self._peek() != ":":
            raise _Malformed
        self._at += 1
        self._said.arguments(": ")
        self._expects = self._value

    def _string(self) -> None:
        end = self._body.find(QUOTE, self._at)
        upto = end if end >= 0 else len(self._body) - may_begin(self._body[self._at :][-len(QUOTE) :], (QUOTE,))
        self._said.arguments(json_text(self._body[self._at : upto])[1:-1])
        self._at = upto
        if end < 0:
            raise _NeedMore
        self._said.arguments('"')
        self._at += len(QUOTE)
        self._expects = self._after_value

    def _after_value(self) -> None:
        mark = self._peek()
        if mark == self._open[-1]:
            self._close()
        elif mark == ",":
            self._at += 1
            self._said.arguments(", ")
            self._expects = self._key if self._open[-1] == "}" else self._value
        else:
            raise _Malformed

    def _close(self) -> None:
        """The outermost brace waits until the block has ended well."""
        self._at += 1
        closer = self._open.pop()
        if self._open:
            self._said.arguments(closer)
            self._expects = self._after_value
        else:
            self._is_done = True

    def _skip_space(self) -> None:
        while self._at < len(self._body) and self._body[self._at].isspace():
            self._at += 1

    def _peek(self) -> str:
        """The next character that is not white."""
        self._skip_space()
        if self._at >= len(self._body):
            raise _NeedMore
        return self._body[self._at]

    def _peek_quote(self) -> bool:
        """Whether a quote comes next; then it is read."""
        self._peek()
        ahead = self._body[self._at : self._at + len(QUOTE)]
        if ahead == QUOTE:
            self._at += len(QUOTE)
        elif QUOTE.startswith(ahead):
            raise _NeedMore
        return ahead == QUOTE

    def _upto(self, ends: str) -> str:
        end = next((at for at in range(self._at, len(self._body)) if self._body[at] in ends), -1)
        if end < 0:
            raise _NeedMore
        text = self._body[self._at : end].strip()
        if not text:
            raise _Malformed
        self._at = end
        return text
