"""Text that grows: tokens to characters without broken characters, trimmed ends, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
BROKEN = "\ufffd"


CHARACTER_BYTES = 4
"""Most bytes of one character, so most tokens that may wait for its last byte."""


class Detokenizer:
    """Decodes a growing run of tokens; a character that is not whole yet waits for its last bytes.

    Pieces end only behind a whole character, or where none can become whole any more (a policy may write bytes that
    are no text, for thousands of tokens), so their concatenation is the decoding of the whole run for every tokenizer
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
    """`str.strip` of a text that arrives in pieces: outer whitespace never leaves."""

    __slots__ = ("_begun", "_held")

    def __init__(self) -> None:
        self._begun, self._held = False, ""

    def push(self, piece: str) -> str:
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return kept


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

    @property
    def holds(self) -> bool:
        """Whether the text so far ends with what may become a stop string."""
        return bool(self._held)

    def push(self, piece: str) -> str:
        if not self._stops or self.found is not None:
            return "" if self.found is not None else piece
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if places:
            at, self.found = min(places)
            self._held = ""
            return text[:at]
        keep = len(text) - self._may_begin(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """How many last characters are a proper beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
