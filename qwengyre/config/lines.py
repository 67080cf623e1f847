"""Where in a TOML file each key stands. `tomllib` checks the file but keeps no positions; this scan only adds them."""

from __future__ import annotations

import re
from typing import Final

KeyPath = tuple[str, ...]

_SIMPLE: Final = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED: Final = rf"{_SIMPLE}(?:\s*\.\s*{_SIMPLE})*"
_TABLE: Final = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_KEY: Final = re.compile(rf"\s*({_DOTTED})\s*=\s*")
_TOKEN: Final = re.compile(r'"""|\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}]')


def key_lines(text: str) -> dict[KeyPath, int]:
    """Map every table and key of a valid TOML text to its line, counted from 1. A key inside an inline table is absent.

    >>> key_lines('a = 1\\n[b.c]\\nd.e = 2\\n')
    {('a',): 1, ('b', 'c'): 2, ('b', 'c', 'd', 'e'): 3}
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line_number = text.count("\n", 0, at) + 1
        if header := _TABLE.fullmatch(text[at:end].split("#")[0].rstrip()):
            table = _parts(header[1])
            found.setdefault(table, line_number)
        elif key := _KEY.match(text, at, end):
            found.setdefault(table + _parts(key[1]), line_number)
            end = _end_of_value(text, key.end())
        at = end + 1
    return found


def line_of(lines: dict[KeyPath, int], key: KeyPath) -> int | None:
    """The line of `key`, or of the nearest table or key around it."""
    for length in range(len(key), 0, -1):
        if key[:length] in lines:
            return lines[key[:length]]
    return None


def _parts(dotted: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in re.findall(_SIMPLE, dotted))


def _end_of_value(text: str, at: int) -> int:
    """Index of the newline that ends the value at `at`: after open brackets and multi-line strings."""
    depth = 0
    while True:
        newline = text.find("\n", at)
        newline = len(text) if newline < 0 else newline
        token = _TOKEN.search(text, at)
        if token is None or (depth == 0 and token.start() > newline):
            return newline
        at = token.end()
        if token[0] in ('"""', "'''"):
            close = text.find(token[0], at)
            at = len(text) if close < 0 else close + 3
        elif token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
