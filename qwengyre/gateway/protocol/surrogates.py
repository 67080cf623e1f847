"""Halves of surrogate pairs, and bytes that are not UTF-8, in a request: a harness that cuts a tool's output cuts characters, too."""

from __future__ import annotations

import codecs
import re
from typing import Final

_ESCAPE: Final = re.compile(rb"\\(?:u([dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[0-9a-fA-F]{4})|.)", re.DOTALL)
_HALF: Final = re.compile(rb"[dD][89a-fA-F]")
_NOT_TEXT: Final = re.compile("[\udc80-\udcff]+")
REPLACEMENT: Final = "\ufffd"
PIECE_BYTES: Final = 1 << 18
"""Of a large body at a time: some milliseconds, for which nobody else has the interpreter."""


def mended(body: bytes) -> tuple[bytes, int]:
    """The JSON with U+FFFD in place of what is not a character, and how often.

    >>> mended(rb'{"a": "cut \\ud83d", "b": "\\ud83d\\ude00 \\\\ud83d"}')
    (b'{"a": "cut \\\\ufffd", "b": "\\\\ud83d\\\\ude00 \\\\\\\\ud83d"}', 1)
    """
    text, num_mended = _as_text(body)
    out, done = bytearray(), 0
    for found in _ESCAPE.finditer(text):
        escape = found.group(1)
        if escape is None or len(escape) > 4 or not _HALF.match(escape):
            continue
        out += text[done : found.start()]
        out += rb"\ufffd"
        done, num_mended = found.end(), num_mended + 1
    out += text[done:]
    return bytes(out), num_mended


def _as_text(body: bytes) -> tuple[bytes, int]:
    """UTF-8 with U+FFFD in place of each run of bytes that is none, and how many there were."""
    try:
        body.decode()
    except UnicodeDecodeError:
        pass
    else:
        return body, 0
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    out, num_broken, is_in_run = bytearray(), 0, False
    for at in range(0, len(body), PIECE_BYTES):
        text = decoder.decode(body[at : at + PIECE_BYTES], final=at + PIECE_BYTES >= len(body))
        goes_on = _NOT_TEXT.match(text) if is_in_run else None
        rest = text[goes_on.end() :] if goes_on else text
        whole, num = _NOT_TEXT.subn(REPLACEMENT, rest)
        out += whole.encode()
        num_broken += num
        is_in_run = bool(_NOT_TEXT.match(text[-1:])) if text else is_in_run
    return bytes(out), num_broken
