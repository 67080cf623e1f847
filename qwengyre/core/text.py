"""Text of others, made safe to show: nothing in it moves a cursor, hides, turns round, or passes for a line of ours."""

from __future__ import annotations

import re
from html import escape
from typing import Final

_ACTING: Final = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # what a terminal obeys: escape sequences begin here, in seven bits and in eight
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069"  # turns the direction of what follows
    "\\u00ad\\u200b\\u2060-\\u2065\\u206a-\\u206f\\ufeff\\ufff9-\\ufffb\\U000e0000-\\U000e0fff"  # cannot be seen
    "\\u2028\\u2029"  # ends a line
    "\\ud800-\\udfff"  # no character: a byte that was not UTF-8, or half of a pair
)
_IN_LINES: Final = re.compile(f"[{_ACTING}]")
_IN_ONE_LINE: Final = re.compile(f"[{_ACTING}\\t\\n]")
_SHORT: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def printable(text: str) -> str:
    """`text` with each character that acts instead of showing written as an escape; lines and tabs stay.

    >>> print(printable("two\\r\\nlines, \\x1b[31mred"))
    two
    lines, \\x1b[31mred
    """
    return _IN_LINES.sub(_escaped, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """As `printable`, with line ends and tabs written as escapes, too.

    >>> print(one_line("a name\\nerror: not ours"))
    a name\\nerror: not ours
    """
    return _IN_ONE_LINE.sub(_escaped, text)


def quoted(text: str) -> str:
    """As `printable`, with a mark before each line, so that no line of it passes for one of ours.

    >>> print(quoted("it failed\nerror: no space left"))
      | it failed
      | error: no space left
    """
    return "\n".join(f"  | {line}" for line in printable(text).split("\n"))


def html_text(text: str) -> str:
    """As `printable`, for a place in a page: inside a tag's attribute or between tags.

    >>> html_text("<b>\x1b[0m")
    '&lt;b&gt;\\x1b[0m'
    """
    return escape(printable(text))


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
