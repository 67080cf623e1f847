"""Demonstrations as token rows, built turn by turn exactly as the gateway builds them. `T` tokens of one row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from renderers import Message as RenderedMessage
from renderers import Qwen3RendererConfig, ToolSpec
from renderers.qwen3 import Qwen3Renderer
from transformers import PreTrainedTokenizerFast

from qwengyre.warmup.demonstrations import Demonstration


@dataclass(frozen=True)
class Row:
    token_ids_T: np.ndarray
    """int32"""
    learned_T: np.ndarray
    """bool: the tokens that the model has to say itself"""

    def __len__(self) -> int:
        return len(self.token_ids_T)


class RowBuilder:
    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = _Remembering(tokenizer)
        self.renderer = Qwen3Renderer(self.tokenizer, Qwen3RendererConfig(enable_thinking=False))
        self._end = tokenizer.get_vocab()["<|im_end|>"]

    @property
    def texts(self) -> Counter[str]:
        """The texts encoded so far, cut as the renderer cuts them, and how often."""
        return self.tokenizer.texts

    def build(self, demonstration: Demonstration) -> Row:
        """One row; the context must end with an assistant message."""
        messages, tools = cast(list[RenderedMessage], demonstration.messages), cast(list[ToolSpec], demonstration.tools)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        ids = self.renderer.render_ids(messages[: turns[0]], tools=tools, add_generation_prompt=True)
        learned = [False] * len(ids)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            said = self._said(demonstration.messages[turn])
            learned += [True] * len(said)
            if following is None:
                ids = ids + said
                break
            extended = self.renderer.bridge_to_next_turn(ids, said, messages[turn + 1 : following], tools=tools)
            assert extended is not None, "demonstrations never think, so a turn always extends the one before"
            ids = extended.token_ids
            learned += [False] * (len(ids) - len(learned))
        return Row(np.array(ids, np.int32), np.array(learned, bool))

    def _said(self, message: dict[str, Any]) -> list[int]:
        text = message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text += "\n" if text else ""
            text += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
        return [*self.tokenizer.encode(text, add_special_tokens=False), self._end]


class _Remembering:
    """A tokenizer that encodes each text once: demonstrations repeat themselves, and a call costs 0.1 ms."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        self.texts: Counter[str] = Counter()
        self._ids: dict[str, list[int]] = {}
        self._encodings: dict[str, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.texts[text] += 1
        if text not in self._ids:
            self._ids[text] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._ids[text]

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts[text] += 1
        if text not in self._encodings:
            self._encodings[text] = self._tokenizer(text, **options)
        return self._encodings[text]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
