"""Text stays text: control tokens that are spelled out in what a harness sends do not become control tokens.

A renderer puts texts and control tokens together before it encodes them. So a spelled-out token is replaced by a word that stands
for it before the renderer sees it, and put back where the tokens are made, out of plain ones.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

from renderers.base import Renderer
from tokenizers import AddedToken, Tokenizer

_MARKUP = frozenset("<>[]|")
"""Tokens that a vocabulary added for plain words or white space have none of these."""


class Literals:
    """Words that stand for the control tokens of one tokenizer and one renderer."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, template: str):
        """`template` is the text of a chat template that writes control tokens itself; empty without one."""
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._controls = tuple(dict.fromkeys(_controls(added, renderer, template)))
        self._numbers = {control: number for number, control in enumerate(self._controls)}
        self._spelled = re.compile(_any_of(self._controls))
        self._nonce = f"Qg{secrets.token_hex(8)}z"
        self._words = re.compile(f"{self._nonce}([0-9]+)q")
        self._added = re.compile(f"({_any_of([token.content for token in added.values() if token.content])})")
        self._plain: Tokenizer | None = None

    def protect(self, text: str) -> str:
        """The text with a word in place of every control token that is spelled out in it."""
        if _MARKUP.isdisjoint(text):
            return text
        return self._spelled.sub(lambda found: f"{self._nonce}{self._numbers[found.group()]}q", text)

    def protect_all(self, value: Any) -> Any:
        """The same for every string in a JSON value."""
        match value:
            case str():
                return self.protect(value)
            case dict():
                return {self.protect(key): self.protect_all(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self.protect_all(inner) for inner in value]
        return value

    def are_in(self, text: str) -> bool:
        return self._nonce in text

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered text with such words in it."""
        ids: list[int] = []
        for piece in self._added.split(text):
            if self.are_in(piece):
                ids += self._encode_plain(self._words.sub(lambda found: self._controls[int(found.group(1))], piece))
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Tokens of a text in which no control token counts."""
        if self._plain is None:
            self._plain = Tokenizer(self._tokenizer.model)
            if self._tokenizer.normalizer is not None:
                self._plain.normalizer = self._tokenizer.normalizer
            if self._tokenizer.pre_tokenizer is not None:
                self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        ids = self._plain.encode(text, add_special_tokens=False).ids
        controls = {self._tokenizer.token_to_id(control) for control in self._controls}
        if controls.isdisjoint(ids):
            return ids
        return [token for part in self._halves(text) for token in self._plain.encode(part, add_special_tokens=False).ids]

    def _halves(self, text: str) -> list[str]:
        """The text cut inside each control token, for a model that has them among its plain tokens, too."""
        parts, start = [], 0
        for found in self._spelled.finditer(text):
            parts.append(text[start : found.start() + 1])
            start = found.start() + 1
        return [*parts, text[start:]]


_STRUCTURE = re.compile(r"<\||\|>|｜|think|tool|arg_|func|param|call")
"""In tokens that make up a turn or a call. Vocabularies have added others for text, `<table>` say: these stay as they are."""


def _controls(added: dict[int, AddedToken], renderer: Renderer, template: str) -> Iterable[str]:
    """Special tokens, those that the renderer holds, those that the template writes, and those that look like one."""
    held = {value for value in vars(renderer).values() if isinstance(value, int)}
    for token, entry in added.items():
        is_markup = not _MARKUP.isdisjoint(entry.content)
        is_known = token in held or entry.content in template or _STRUCTURE.search(entry.content) is not None
        if entry.content.strip() and (entry.special or (is_markup and is_known)):
            yield entry.content


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of `words`, by a tree of their letters: vocabularies have thousands that begin alike."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(tree) or r"(?!)"


def _pattern(tree: dict[str, Any]) -> str:
    letters = []
    while len(tree) == 1 and "" not in tree:
        [(letter, tree)] = tree.items()
        letters.append(re.escape(letter))
    branches = [re.escape(letter) + _pattern(inner) for letter, inner in tree.items() if letter]
    tail = f"(?:{'|'.join(branches)})" + ("?" if "" in tree else "") if branches else ""
    return "".join(letters) + tail
