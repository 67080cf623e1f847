"""Demonstrations, tokenizer and rows: what is learned is exactly what the gateway will ask for."""

from __future__ import annotations

import itertools
import json

import msgspec
import numpy as np
import pytest
from renderers import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

from qwengyre.sandbox.families.mini_repositories import OPERATORS, WATCH_COMMAND, split_pairs
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.demonstrations import demonstrate
from qwengyre.warmup.demonstrator import mistaken
from qwengyre.warmup.rows import RowBuilder
from qwengyre.warmup.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS, is_copied, learn_tokenizer
from qwengyre_harness.agent import SUB_SYSTEM, SUMMARY_HEAD, SUMMARY_REQUEST

CONFIG = WarmupConfig(delegate=0.2, watch=0.05)


@pytest.fixture(scope="module")
def contexts():
    return list(itertools.chain.from_iterable(itertools.islice(demonstrate(CONFIG, seed=0), 60)))


@pytest.fixture(scope="module")
def tokenizer(contexts):
    return learn_tokenizer(contexts)


def calls(contexts):
    for context in contexts:
        for message in context.messages:
            for call in message.get("tool_calls", ()):
                yield call["function"]["name"], json.loads(call["function"]["arguments"])


def test_the_same_seed_plays_the_same_demonstrations():
    def play(seed):
        return msgspec.json.encode(list(itertools.islice(demonstrate(CONFIG, seed), 5)))

    assert play(1) == play(1) != play(2)


def test_all_that_a_run_must_show_occurs_in_them(contexts):
    systems = {context.messages[0]["content"] for context in contexts}
    texts = [message["content"] for context in contexts for message in context.messages]
    assert SUB_SYSTEM in systems and len(systems) == 2
    assert SUMMARY_REQUEST in texts and any(SUMMARY_HEAD in text for text in texts)
    assert {"write_file", "run", "delegate"} <= {name for name, _ in calls(contexts)}
    assert any(arguments.get("command") == WATCH_COMMAND for _, arguments in calls(contexts))


def test_no_context_is_the_beginning_of_another(contexts):
    for a, b in itertools.permutations(contexts[:40], 2):
        assert b.messages[: len(a.messages)] != a.messages


def test_no_held_out_pair_is_ever_shown(contexts):
    held_out = {f"x {pair.word} {pair.constant}" for pair in split_pairs(0)[1]}
    text = "\n".join(message["content"] for context in contexts for message in context.messages)
    shown = {line.split(" is ")[1] for line in text.splitlines() if ") is x " in line}
    assert shown and not shown & held_out


def test_the_usual_mistake_is_more_likely_than_the_right_operator():
    assert CONFIG.usual_mistake > CONFIG.right_operator
    assert {mistaken(word) for word in OPERATORS} == set(OPERATORS.values())
    assert all(mistaken(word) != symbol for word, symbol in OPERATORS.items())


def test_rows_are_what_the_renderer_renders(contexts, tokenizer):
    builder, renderer = RowBuilder(tokenizer), Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
    for context in contexts:
        rendered = renderer.render_ids(context.messages, tools=context.tools)
        assert builder.build(context).token_ids_T.tolist() == rendered[:-1], "without the line break after the last turn"


def test_only_what_the_model_says_is_learned(contexts, tokenizer):
    builder = RowBuilder(tokenizer)
    for context in contexts[:20]:
        row = builder.build(context)
        said = tokenizer.decode(row.token_ids_T[row.learned_T])
        replies = [message for message in context.messages if message["role"] == "assistant"]
        assert said.count("<|im_end|>") == len(replies)
        assert "<think>" not in said and "<tool_response>" not in said
        assert said.count("<tool_call>") == sum(len(reply.get("tool_calls", ())) for reply in replies)


def test_the_chat_template_of_the_model_folder_renders_the_same_text(contexts, tokenizer):
    renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
    for context in contexts[:20]:
        expected = tokenizer.decode(renderer.render_ids(context.messages, tools=context.tools))
        assert tokenizer.apply_chat_template(context.messages, tools=context.tools, tokenize=False) == expected


def test_tokens_of_qwen3_are_single_tokens(tokenizer):
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]


def test_contexts_are_short_and_any_text_survives(contexts, tokenizer):
    rows = [RowBuilder(tokenizer).build(context) for context in contexts]
    assert max(map(len, rows)) < 600
    for text in ("", "naïve 123 café\t\n", "def f(x):\n    return x + 999\n", '<tool_call> {"a": 1}', "日本語"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_names_and_numbers_are_copied_and_operators_are_not(tokenizer):
    copied = is_copied(tokenizer)
    assert all(copied[tokenizer.convert_tokens_to_ids(token)] for token in ("f", "g", "7", "40"))
    assert not any(copied[tokenizer.convert_tokens_to_ids(token)] for token in ("+", "//", "plus", "<think>"))
    assert copied.dtype == np.bool_
