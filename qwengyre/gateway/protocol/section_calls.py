"""Tool calls whose arguments are plain JSON after a header of the format's own: Kimi's, DeepSeek's and DSML's."""

from __future__ import annotations

import re
from typing import Final

from qwengyre.gateway.protocol.calls import Argument, ArgumentsWriter
from qwengyre.gateway.protocol.said import Said
from qwengyre.gateway.protocol.text import Trimmed, may_begin
from qwengyre.gateway.protocol.tool_block import RawArguments, broken, is_json


class KimiCall:
    """`functions.NAME:INDEX`, a control token, JSON."""

    def __init__(self, said: Said, arguments_begin: int):
        self._said, self._arguments_begin = said, arguments_begin
        self._whole = ""
        self._name = ""
        self._arguments: RawArguments | None = None
        self.may_end = False
        """The arguments have begun."""

    def text(self, piece: str) -> None:
        self._whole += piece
        if self._arguments is not None:
            self._arguments.push(piece)

    def mark(self, token: int, piece: str) -> None:
        if token != self._arguments_begin or self.may_end:
            self.text(piece)
            return
        self.may_end = True
        head = self._whole.strip().split(":", 1)[0]
        self._name = head.split(".", 1)[1] if "." in head else head
        self._whole += piece
        if self._name:
            self._said.call(self._name)
            self._arguments = RawArguments(self._said)

    def finish(self, *, closed: bool) -> str | None:
        if self._arguments is None:
            return self._whole
        self._arguments.close(is_closed=closed)
        return None


_FENCE: Final = "```json"
_FENCED: Final = re.compile(r"```(?:json)?\s*([\s\S]*?)\s*```$")


class FencedCall:
    """`function`, a control token, a line with the name, JSON in a Markdown fence."""

    may_end = True

    def __init__(self, said: Said, separator: int):
        self._said, self._separator = said, separator
        self._whole = ""
        self._after: str | None = None
        """The text after the separator."""
        self._arguments: RawArguments | None = None
        self._rest = ""
        self._is_fenced = False

    def text(self, piece: str) -> None:
        self._whole += piece
        if self._arguments is not None:
            self._rest += piece
            self._arguments.push(piece)
        elif self._after is not None:
            self._after += piece
            self._begin()

    def mark(self, token: int, piece: str) -> None:
        if token != self._separator or self._after is not None:
            self.text(piece)
            return
        self._whole += piece
        self._after = ""

    def finish(self, *, closed: bool) -> str | None:
        if self._after is None or not (name := self._head()[0]):
            return self._whole
        if self._arguments is None:
            return self._finish_short(name, closed=closed)
        rest = self._rest.strip()
        fenced = _FENCED.match(rest)
        text = (fenced.group(1).strip() or "{}") if fenced else "" if self._is_fenced else rest
        self._arguments.end(text if closed and is_json(text) else broken(text) if closed else None)
        return None

    def _head(self) -> tuple[str, str | None]:
        """The name, and what follows its line; None while the line may go on."""
        name, line_end, rest = (self._after or "").lstrip().partition("\n")
        return name.strip(), rest.lstrip() if line_end else None

    def _begin(self) -> None:
        name, rest = self._head()
        if not name or not rest or (len(rest) < len(_FENCE) and _FENCE.startswith(rest)):
            return
        self._said.call(name)
        self._arguments = RawArguments(self._said)
        self._rest, self._is_fenced = rest, rest.startswith("```")
        self._arguments.push(rest.removeprefix(_FENCE) if rest.startswith(_FENCE) else rest.removeprefix("```"))

    def _finish_short(self, name: str, *, closed: bool) -> str | None:
        """A call without arguments, or with the beginning of a fence for some."""
        self._said.call(name)
        rest = (self._head()[1] or "").rstrip()
        self._said.arguments(rest or ("{}" if closed else "{"))
        return None


_OPEN: Final = re.compile(r'<｜DSML｜parameter name="(.*?)" string="(true|false)">', re.DOTALL)
_OPEN_PREFIX: Final = "<｜DSML｜parameter"
_CLOSE: Final = "</｜DSML｜parameter>"


class DsmlCall:
    """DeepSeek V4's: ` name="NAME">` and parameters that say whether they are strings."""

    may_end = True

    def __init__(self, said: Said):
        self._writer = ArgumentsWriter(said)
        self._body = ""
        self._at = 0
        self._is_begun = self._is_broken = False
        self._keys: set[str] = set()
        self._argument: Argument | None = None

    def text(self, piece: str) -> None:
        self._body += piece
        while self._step():
            pass

    def mark(self, token: int, piece: str) -> None:
        self.text(piece)

    def finish(self, *, closed: bool) -> str | None:
        if not self._is_begun:
            return self._body
        rest = "" if self._argument is not None else self._body[self._at :]
        is_whole = closed and not self._is_broken and self._argument is None and not rest.strip("\n")
        self._writer.end(is_valid=is_whole)
        return None

    def _step(self) -> bool:
        if self._argument is not None:
            return self._read_value(self._argument)
        return self._read_open() if self._is_begun else self._read_head()

    def _read_head(self) -> bool:
        end = self._body.find(">\n")
        head = self._body[:end]
        if end < 0 or not (head.startswith(' name="') and head.endswith('"') and len(head) > len(' name=""')):
            return False
        self._is_begun, self._at = True, end + 2
        self._writer.begin(head[len(' name="') : -1])
        return True

    def _read_open(self) -> bool:
        at = self._body.find(_OPEN_PREFIX, self._at)
        found = _OPEN.search(self._body, at) if at >= 0 else None
        if found is None:
            return False
        key, is_string = found.groups()
        self._is_broken |= key in self._keys or bool(self._body[self._at : found.start()].strip("\n"))
        self._keys.add(key)
        self._at = found.end()
        self._argument = Argument(self._writer, key, is_string=is_string == "true", trim=Trimmed(""))
        return True

    def _read_value(self, argument: Argument) -> bool:
        at = self._body.find(_CLOSE, self._at)
        keep = 0 if at >= 0 else may_begin(self._body[self._at :][-len(_CLOSE) :], (_CLOSE,))
        upto = at if at >= 0 else len(self._body) - keep
        argument.push(self._body[self._at : upto])
        self._at = upto
        if at < 0:
            return False
        argument.close()
        self._argument, self._at = None, at + len(_CLOSE)
        return True
