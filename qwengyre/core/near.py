"""The word that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `known`, None when none is similar. Words with other numbers in them are other things, not misspelt ones.

    >>> nearest("elastik", ["elastic", "async"]), nearest("bfloat16", ["float32", "float64"])
    ('elastic', None)
    """
    same = {candidate.lower(): candidate for candidate in known if _digits(word) in ("", _digits(candidate))}
    found = difflib.get_close_matches(word.lower(), same, n=1, cutoff=cutoff)
    return same[found[0]] if found else None


def _digits(word: str) -> str:
    return "".join(letter for letter in word if letter.isdigit())
