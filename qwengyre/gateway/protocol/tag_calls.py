"""Tool calls whose arguments stand between tags, read while they are written: tags of text, or of control tokens of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from qwengyre.gateway.protocol.calls import Argument, ArgumentsWriter, IsString
from qwengyre.gateway.protocol.said import Said, value_of
from qwengyre.gateway.protocol.text import Trimmed, may_begin


class Tag(msgspec.Struct, frozen=True):
    """An opening tag: `pattern` finds it, with its name as the first group; `prefix` is the text that every one begins with."""

    prefix: str
    pattern: re.Pattern[str]


class TagForm(msgspec.Struct, frozen=True):
    """How calls of one format are written in a block."""

    open: Tag
    """Of an argument."""
    close: str
    head: Tag | None = None
    """Of the call; without one the block begins with the call's name."""
    tail: str | None = None
    """Of the call, where a block may have several; without one the block's end is the call's."""


QWEN35: Final = TagForm(
    head=Tag("<function=", re.compile(r"<function=([^>]+)>")),
    open=Tag("<parameter=", re.compile(r"<parameter=([^>]+)>")),
    close="</parameter>",
)
MINIMAX: Final = TagForm(
    head=Tag("<invoke name=", re.compile(r'<invoke name="([^"]+)">')),
    tail="</invoke>",
    open=Tag("<parameter name=", re.compile(r'<parameter name="([^"]+)">')),
    close="</parameter>",
)
LAGUNA: Final = TagForm(
    open=Tag("<arg_key>", re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)), close="</arg_value>"
)


class TagCall:
    """A block whose tags are text."""

    may_end = True

    def __init__(self, said: Said, is_string: IsString, form: TagForm):
        self._writer, self._is_string, self._form = ArgumentsWriter(said), is_string, form
        self._body = ""
        self._at = 0
        """What lies before is read."""
        self._name = ""
        self._has_calls = self._is_early = False
        self._waits = False
        """A call is whole, but not its block: whether it is one, and the calls after it, will be seen at the block's end."""
        self._argument: Argument | None = None

    def text(self, piece: str) -> None:
        self._body += piece
        while not (self._is_early or self._waits) and self._step():
            pass

    def mark(self, token: int, piece: str) -> None:
        self.text(piece)

    def finish(self, *, closed: bool) -> str | None:
        while closed and self._waits:
            self._writer.end(is_valid=True)
            self._waits = False
            self.text("")
        if closed and (self._is_early or not self._has_calls):
            self._read_at_end()
        elif self._name:
            self._writer.end(is_valid=closed and self._form.tail is None)
        return None if self._has_calls else self._body.strip()

    def _step(self) -> bool:
        """Read the next tag or piece of a value; False when more text is needed."""
        if self._argument is not None:
            return self._read_value(self._argument)
        if self._name:
            return self._read_open()
        return self._read_head(self._form.head) if self._form.head is not None else self._read_name()

    def _read_head(self, head: Tag) -> bool:
        found = self._find(head, len(self._body))
        if found is None:
            return False
        if self._form.tail is None and 0 <= self._body.find(self._form.open.prefix) < found.end():
            self._is_early = True  # an argument before the call's head belongs to the call, too
            return False
        self._begin(found.group(1), found.end())
        return True

    def _read_name(self) -> bool:
        at = self._body.find(self._form.open.prefix)
        name = self._body[:at].strip() if at >= 0 else ""
        if name:
            self._begin(name, at)
        return bool(name)

    def _begin(self, name: str, at: int) -> None:
        self._name, self._at, self._has_calls = name, at, True
        self._writer.begin(name)

    def _read_open(self) -> bool:
        tail = self._form.tail or ""
        end = self._body.find(tail, self._at) if tail else -1
        found = self._find(self._form.open, end if end >= 0 else len(self._body))
        if found is not None:
            self._begin_argument(found)
            return True
        if end >= 0:
            self._end_call(end + len(tail))
        return end >= 0

    def _begin_argument(self, found: re.Match[str]) -> None:
        key = found.group(1) if self._form.head is not None else found.group(1).strip()
        self._at = found.end()
        self._argument = Argument(self._writer, key, is_string=self._is_string(self._name, key), trim=Trimmed())

    def _read_value(self, argument: Argument) -> bool:
        ends = [end for end in (self._form.close, self._form.tail) if end]
        places = [(at, end) for end in ends if (at := self._body.find(end, self._at)) >= 0]
        if not places:
            keep = may_begin(self._body[self._at :][-max(map(len, ends)) :], ends)
            upto = len(self._body) - keep
            argument.push(self._body[self._at : upto])
            self._at = upto
            return False
        at, end = min(places)
        argument.push(self._body[self._at : at])
        if end == self._form.close:
            argument.close()
            self._at = at + len(end)
        else:
            self._end_call(at + len(end))
        self._argument = None
        return True

    def _end_call(self, upto: int) -> None:
        self._waits, self._name, self._at = True, "", upto

    def _find(self, tag: Tag, end: int) -> re.Match[str] | None:
        at = self._body.find(tag.prefix, self._at, end)
        return tag.pattern.search(self._body, at, end) if at >= 0 else None

    def _read_at_end(self) -> None:
        """A call without arguments, or one that begins in an unusual way."""
        head = self._form.head
        found = head.pattern.search(self._body) if head is not None else None
        name = found.group(1) if found else self._body.strip() if head is None and "<arg_key>" not in self._body else ""
        if not name or (self._form.tail is not None):
            return
        self._begin(name, 0)
        pattern = re.compile(f"{self._form.open.pattern.pattern}(.*?){re.escape(self._form.close)}", re.DOTALL)
        for key, text in pattern.findall(self._body):
            value = text.strip()
            self._writer.add(key, value if self._is_string(name, key) else value_of(value))
        self._writer.end(is_valid=True)


class TagTokens(msgspec.Struct, frozen=True):
    """Control tokens inside a call."""

    key: int
    key_end: int
    value: int
    value_end: int
    name_end: int | None = None


class TokenTagCall:
    """A block whose tags are control tokens: a name, then keys and values. Spelled out in text they are text."""

    may_end = True

    def __init__(self, said: Said, is_string: IsString, tags: TagTokens):
        self._said, self._is_string, self._tags = said, is_string, tags
        self._writer = ArgumentsWriter(said)
        self._whole = ""
        self._text = ""
        """Of the name or the key that is being read."""
        self._name = ""
        self._argument: Argument | None = None
        self._expects: Callable[[int, str], bool] = self._in_name
        self._waiting: list[tuple[int | None, str]] = []
        """What followed a key before the name had ended: the name may still grow."""

    def text(self, piece: str) -> None:
        self._whole += piece
        if self._waiting:
            self._waiting.append((None, piece))
        else:
            self._literal(piece)

    def mark(self, token: int, piece: str) -> None:
        if self._waiting and token != self._tags.name_end:
            self._whole += piece
            self._waiting.append((token, piece))
            return
        self._waiting.clear()
        if not self._expects(token, piece):
            self._literal(piece)
        self._whole += piece

    def finish(self, *, closed: bool) -> str | None:
        if self._waiting:
            self._replay()
        if not self._name and closed and (name := self._text.strip()):
            self._begin(name)
        if not self._name:
            return self._whole.strip()
        self._writer.end(is_valid=closed and self._expects == self._between)
        return None

    def _literal(self, piece: str) -> None:
        if self._argument is not None:
            self._argument.push(piece)
        elif self._expects in (self._in_name, self._in_key):
            self._text += piece

    def _replay(self) -> None:
        """The name had no end of its own: it ended before the first key."""
        waiting, self._waiting = self._waiting, []
        self._begin(self._text.strip())
        for token, piece in waiting:
            if token is None or not self._expects(token, piece):
                self._literal(piece)

    def _begin(self, name: str) -> None:
        self._name, self._text, self._expects = name, "", self._between if name else self._nothing
        if name:
            self._writer.begin(name)

    def _nothing(self, token: int, piece: str) -> bool:
        """Whatever follows a call without a name."""
        return True

    def _in_name(self, token: int, piece: str) -> bool:
        tags = self._tags
        if token == tags.name_end:
            self._begin(self._whole.strip())
        elif token == tags.key and tags.name_end is not None:
            self._waiting.append((token, piece))
        elif token == tags.key:
            self._begin(self._text.strip())
            return self._expects(token, piece)
        else:
            return False
        return True

    def _between(self, token: int, piece: str) -> bool:
        if token == self._tags.key:
            self._text, self._expects = "", self._in_key
        return True

    def _in_key(self, token: int, piece: str) -> bool:
        if token != self._tags.key_end:
            return False
        self._expects = self._before_value
        return True

    def _before_value(self, token: int, piece: str) -> bool:
        if token == self._tags.value:
            key = self._text.strip()
            is_string = self._is_string(self._name, key)
            self._argument = Argument(self._writer, key, is_string=is_string, trim=Trimmed())
            self._expects = self._in_value
        return True

    def _in_value(self, token: int, piece: str) -> bool:
        if token != self._tags.value_end or self._argument is None:
            return False
        self._argument.close()
        self._argument, self._expects = None, self._between
        return True
