"""The tokenizer and chat template of a model folder as the `renderers` package wants them: no torch, no transformers.

Long texts that come again (a system prompt with its tools, at every sub-agent and after every compaction) are encoded once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from renderers.base import Renderer
from tokenizers import Tokenizer

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.templates.jinja import ChatTemplate, read_json, special_tokens
from qwengyre.gateway.templates.literal import Literals

_CACHE_CHARS = 4_000_000
_CACHED_TEXT_CHARS = 2_000_000
_LONG_CHARS = 20_000
"""From here on the library's call for batches is faster, which gives no offsets."""


class FastTokenizer:
    """Satisfies `renderers.base.Tokenizer`; may be used from several threads. Offsets are not offered: the gateway attributes no
    tokens to characters."""

    def __init__(self, tokenizer: Tokenizer, folder: Path):
        """`folder` is the model's, whose other files are read when they are needed."""
        self._tokenizer, self._folder = tokenizer, folder
        self.name_or_path = str(folder)
        special = special_tokens(folder)
        self.unk_token_id = _token_id(tokenizer, special.get("unk_token"))
        self.eos_token_id = _token_id(tokenizer, special.get("eos_token"))
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()
        self.literals: Literals | None = None
        """Makes text of control tokens that a harness spelled out, for the renderer that this tokenizer has."""
        self.num_encoded_tokens = 0
        """Tokens that were really encoded, cache hits aside."""

    @classmethod
    def from_folder(cls, model: str | Path) -> FastTokenizer:
        """Load `tokenizer.json` of a model folder. Raises ConfigError when it is missing or not a tokenizer."""
        folder = Path(model)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("there is no tokenizer.json in this folder", file=str(folder), key="model")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"this tokenizer cannot be read: {error}", file=str(file), key="model") from error
        return cls(tokenizer, folder)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The folder's own chat template. Raises ConfigError for one that is not valid."""
        return ChatTemplate.from_folder(self._folder)

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the folder says: those of generation_config.json, and the tokenizer's `eos_token`."""
        found = read_json(self._folder / "generation_config.json").get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        return tuple(dict.fromkeys(token for token in (*ids, self.eos_token_id) if isinstance(token, int)))

    def need_template(self) -> ChatTemplate:
        """Raises ConfigError for a folder without one."""
        if self.template is None:
            raise ConfigError(
                f"{self.name_or_path} has no chat template: name the renderer of its family", key="gateway.renderer.name"
            )
        return self.template

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[Mapping[str, object]] | None = None, **settings: object
    ) -> list[int]:
        """Tokens of a conversation by the folder's own template. Raises TemplateRefused, ConfigError."""
        given = {name: value for name, value in settings.items() if name not in ("tokenize", "return_dict")}
        return self.encode(self.need_template().render(messages, tools=tools, **given))

    def protect_from(self, renderer: Renderer) -> Literals:
        """Have control tokens that are spelled out in texts stay text, once these went through the result's `protect`."""
        template = self.template.source if self.template is not None else ""
        self.literals = Literals(self._tokenizer, renderer, template)
        return self.literals

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        with self._lock:
            cached = self._cache.get(text)
            if cached is not None:
                self._cache.move_to_end(text)
                return cached
        if self.literals is not None and self.literals.are_in(text):
            ids = self.literals.encode(text)
        elif len(text) < _LONG_CHARS:
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


def _token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    return tokenizer.token_to_id(token) if token else None
