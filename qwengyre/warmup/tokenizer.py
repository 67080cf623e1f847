"""A small tokenizer learned from demonstrations: bytes, Qwen3's special tokens, and whole phrases.

What varies (names, operators, numbers) is a token of its own. Text is cut only there, and a piece that occurs often is one
token however many words it has (superword tokens, as in SuperBPE, arXiv 2503.13423): a system prompt with its tool
specifications is a handful of tokens, a tool call a dozen, and each decision of the policy is one token among few. Any other
text falls back to bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qwengyre.sandbox.families.mini_repositories import NAMES, OPERATORS
from qwengyre.warmup.chat_template import CHAT_TEMPLATE
from qwengyre.warmup.demonstrations import Demonstration
from qwengyre.warmup.rows import RowBuilder

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NUM_NUMBERS = 100
MIN_OCCURRENCES = 5

_SYMBOLS = sorted(OPERATORS.values(), key=len, reverse=True)
_ATOM = re.compile(
    r"((?:" + "|".join(re.escape(token) for token in CONTROL_TOKENS + MARKUP_TOKENS) + r")"
    r"|(?<!\w)\d+"
    r"|(?<=is x )\w+"
    r"|(?<=return x )(?:" + "|".join(map(re.escape, _SYMBOLS)) + r")"
    r"|(?<!\w)[a-z](?=\.py|\(x\)))"
)


def learn_tokenizer(demonstrations: Iterable[Demonstration]) -> PreTrainedTokenizerFast:
    """The tokenizer of these demonstrations; its vocabulary depends on nothing else."""
    builder = RowBuilder(_wrap(_byte_tokenizer()))
    for demonstration in demonstrations:
        builder.build(demonstration)
    pieces: Counter[str] = Counter()
    for text, count in builder.texts.items():
        pieces.update({piece: count for piece in _ATOM.split(text) if piece})
    phrases = [piece for piece, count in pieces.items() if count >= MIN_OCCURRENCES]
    return _wrap(_byte_tokenizer([*sorted(phrases), *map(str, range(NUM_NUMBERS))]))


def is_copied(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """By token id, whether it is a name or a number: in a tool call the model can only have copied it from its context."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.array([token.isdigit() or token in NAMES for token in tokens])


def is_operator(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """By token id, whether it is a Python operator of the family."""
    operators = list(OPERATORS.values())
    return np.array([token in operators for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))])


def is_decided(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """By token id, whether it is a name, a number or an operator: all that tells one tool call from another."""
    decided: np.ndarray = is_copied(tokenizer) | is_operator(tokenizer)
    return decided


def _byte_tokenizer(phrases: Sequence[str] = ()) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    plain = dict.fromkeys([*MARKUP_TOKENS, *phrases])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain if token not in alphabet])
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
