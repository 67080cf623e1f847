"""Halves of surrogate pairs, and bytes that are not UTF-8, in a request: a harness that cuts a tool's output cuts characters, too."""

from __future__ import annotations

import re
from typing import Final

_ESCAPE: Final = re.compile(rb"\\(?:u([dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[0-9a-fA-F]{4})|.)", re.DOTALL)
_HALF: Final = re.compile(rb"[dD][89a-fA-F]")
_NOT_TEXT: Final = re.compile("[\udc80-\udcff]+")
REPLACEMENT: Final = "\ufffd"


def mended(body: bytes) -> tuple[bytes, int]:
    """The JSON with U+FFFD in place of what is not a character, and how often.

    >>> mended(rb'{"a": "cut \\ud83d", "b": "\\ud83d\\ude00 \\\\ud83d"}')
    (b'{"a": "cut \\\\ufffd", "b": "\\\\ud83d\\\\ude00 \\\\\\\\ud83d"}', 1)
    """
    num_mended = 0

    def mend(found: re.Match[bytes]) -> bytes:
        nonlocal num_mended
        escape = found.group(1)
        if escape is None or len(escape) > 4 or not _HALF.match(escape):
            return found.group()
        num_mended += 1
        return rb"\ufffd"

    text, num_broken = _NOT_TEXT.subn(REPLACEMENT, body.decode("utf-8", "surrogateescape"))
    whole = _ESCAPE.sub(mend, text.encode())
    return whole, num_mended + num_broken
