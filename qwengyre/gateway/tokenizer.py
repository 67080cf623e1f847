"""The tokenizer as the `renderers` package wants it, on the Rust library alone: no torch, no transformers.

Long texts that come again (a system prompt with its tools, at every sub-agent and after every compaction) are encoded once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from qwengyre.core.errors import ConfigError

_CACHE_CHARS = 4_000_000
_CACHED_TEXT_CHARS = 2_000_000
_LONG_CHARS = 20_000
"""From here on the library's call for batches is faster, which gives no offsets."""


class FastTokenizer:
    """Satisfies `renderers.base.Tokenizer`; may be used from several threads. Offsets are not offered: the gateway attributes no
    tokens to characters."""

    def __init__(self, tokenizer: Tokenizer, *, name_or_path: str, unk_token: str | None, eos_token: str | None):
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.unk_token_id = tokenizer.token_to_id(unk_token) if unk_token else None
        self.eos_token_id = tokenizer.token_to_id(eos_token) if eos_token else None
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()
        self.num_encoded_tokens = 0
        """Tokens that were really encoded, cache hits aside."""

    @classmethod
    def from_folder(cls, model: str | Path) -> FastTokenizer:
        """Load `tokenizer.json` of a model folder. Raises ConfigError when it is missing."""
        folder = Path(model)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("there is no tokenizer.json in this folder", file=str(folder), key="model")
        special = _special_tokens(folder)
        return cls(
            Tokenizer.from_file(str(file)),
            name_or_path=str(model),
            unk_token=special.get("unk_token"),
            eos_token=special.get("eos_token"),
        )

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        with self._lock:
            cached = self._cache.get(text)
            if cached is not None:
                self._cache.move_to_end(text)
                return cached
        if len(text) < _LONG_CHARS:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        with self._lock:
            self.num_encoded_tokens += len(ids)
            if len(text) <= _CACHED_TEXT_CHARS and text not in self._cache:
                self._remember(text, ids)
        return ids

    def count(self, text: str) -> int:
        """Tokens of a long text; nothing is remembered."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, token_ids: Sequence[int] | int, *_: object, **__: object) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def _remember(self, text: str, ids: list[int]) -> None:
        self._cache[text] = ids
        self._cached_chars += len(text)
        while self._cached_chars > _CACHE_CHARS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_chars -= len(oldest)


def _special_tokens(folder: Path) -> dict[str, str]:
    """`unk_token` and `eos_token` of tokenizer_config.json, as plain strings."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    config = msgspec.json.decode(file.read_bytes())
    found = {}
    for name in ("unk_token", "eos_token"):
        value = config.get(name)
        found[name] = value.get("content") if isinstance(value, dict) else value
    return {name: value for name, value in found.items() if isinstance(value, str)}
