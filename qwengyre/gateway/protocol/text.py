"""Text that grows: tokens to characters without broken characters, trimmed ends, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[Sequence[int]], str]
BROKEN = "\ufffd"


class Trim(Protocol):
    """Takes a text in pieces and gives it back without what does not count at its ends."""

    def push(self, piece: str) -> str: ...


CHARACTER_BYTES = 4
"""Most bytes of one character, so most tokens that may wait for its last byte."""


class Detokenizer:
    """Decodes a growing run of tokens; a character that is not whole yet waits for its last bytes.

    Pieces end only after a whole character, or where none can become whole any more (a policy may write bytes that
    are not text, for thousands of tokens), so their concatenation is the decoding of the whole run for every tokenizer
    that decodes bytewise.
    """

    __slots__ = ("_decode", "_pending")

    def __init__(self, decode: Decode):
        self._decode = decode
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += token_ids
        text = self._decode(self._pending)
        if not text.endswith(BROKEN):
            self._pending.clear()
            return text
        if len(self._pending) < 2 * CHARACTER_BYTES:
            return ""
        return self._push_whole(text)

    def _push_whole(self, text: str) -> str:
        """All of `text`, the decoding of what waits, but the last tokens that may still become a character."""
        for keep in range(1, CHARACTER_BYTES):
            whole, rest = self._decode(self._pending[:-keep]), self._decode(self._pending[-keep:])
            if not whole.endswith(BROKEN) and whole + rest == text:
                self._pending = self._pending[-keep:]
                return whole
        whole, rest = self._decode(self._pending[:-CHARACTER_BYTES]), self._decode(self._pending[-CHARACTER_BYTES:])
        if whole + rest != text:
            return ""
        self._pending = self._pending[-CHARACTER_BYTES:]
        return whole

    def flush(self) -> str:
        """What waits, whole or not: the run has ended."""
        text = self._decode(self._pending) if self._pending else ""
        self._pending.clear()
        return text


class Trimmed:
    """`str.strip(chars)` of a text that arrives in pieces: its ends never leave. Without `chars` whitespace, with "" nothing."""

    __slots__ = ("_begun", "_chars", "_held")

    def __init__(self, chars: str | None = None) -> None:
        self._chars, self._begun, self._held = chars, False, ""

    def push(self, piece: str) -> str:
        text = self._held + piece
        if not self._begun:
            text = text.lstrip(self._chars)
            self._begun = bool(text)
        kept = text.rstrip(self._chars)
        self._held = text[len(kept) :]
        return kept


class Unblank:
    """A text that is left as it is, unless there is nothing but white space in it."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: str | None = ""

    def push(self, piece: str) -> str:
        if self._held is None:
            return piece
        text = self._held + piece
        self._held = text if text.isspace() or not text else None
        return text if self._held is None else ""


class Marked:
    """Finds markers in a text that arrives in pieces, and holds back what may still become one.

    >>> found = Marked(("<a>", "</a>"))
    >>> found.push("x<"), found.push("a>y<b"), found.flush()
    ([('x', '')], [('', '<a>'), ('y<b', '')], '')
    """

    def __init__(self, markers: Sequence[str]):
        self._markers = tuple(sorted(markers, key=len, reverse=True))
        self._first = frozenset(marker[0] for marker in markers)
        self._held = ""

    def push(self, piece: str) -> list[tuple[str, str]]:
        """Pairs of text and the marker after it; the last one may have none."""
        text, found = self._held + piece, []
        if self._first.isdisjoint(text):
            return [(text, "")]
        while True:
            places = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
            if not places:
                break
            at, marker = min(places, key=lambda place: (place[0], -len(place[1])))
            found.append((text[:at], marker))
            text = text[at + len(marker) :]
        keep = len(text) - may_begin(text, self._markers)
        self._held = text[keep:]
        if keep:
            found.append((text[:keep], ""))
        return found

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def may_begin(text: str, markers: Sequence[str]) -> int:
    """How many last characters of `text` are a proper beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    tail = text[-longest:] if longest else ""
    for at, char in enumerate(tail):
        if any(marker[0] == char and len(marker) > len(tail) - at and marker.startswith(tail[at:]) for marker in markers):
            return len(tail) - at
    return 0


class StopStrings:
    """Ends a text before the first of `stops`; holds back what may still become one.

    >>> until = StopStrings(("END",))
    >>> until.push("so E"), until.push("Nough EN"), until.push("D more"), until.found
    ('so ', 'ENough ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        if not self._stops or self.found is not None:
            return "" if self.found is not None else piece
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if places:
            at, self.found = min(places)
            self._held = ""
            return text[:at]
        keep = len(text) - may_begin(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
