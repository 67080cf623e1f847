"""Streaming equals `parse_response` of the whole, in any chunking."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.gateway.protocol.deltas import AnswerSoFar, TextDelta, ToolArguments, ToolStart
from qwengyre.gateway.protocol.parse import WholeParser
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trajectory.match import Turn

PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_start|>", "assistant\n", "\n", " ", "  hi ",
    "text", "é", "日本", "\U0001f600", '{"name": "f", "arguments": {"a": "x}", "b": [1, {"c": 2}]}}', '{"name": "f", "arguments": {}}',
    '{"arguments": {"a": 1}, "name": "g"}', '{"name": "", "arguments": {}}', '{"name": "f", "arguments": ', '{"a": "\\\\\\"}"}', "}",
    '{"name": "f"}', '{"name": "f", "arguments": "{}"}', "not json", '{"name": "f", "arguments": {"a": 1}}}', "[1]", '"\\u00e9\\ud83d"',
]  # fmt: skip


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering.from_folder(write_byte_tokenizer(tmp_path_factory.mktemp("model")), {"name": "qwen3"})


def completions():
    """Completions made of what matters to the grammar, and raw bytes that are no text."""
    piece = st.one_of(st.sampled_from(PIECES), st.integers(0, 255), st.lists(st.integers(160, 255), min_size=9, max_size=30))
    return st.tuples(st.lists(piece, max_size=12), st.booleans())


def encode(rendering: Rendering, pieces: list, stops: bool) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += rendering.tokenizer.encode(piece) if isinstance(piece, str) else [piece] if isinstance(piece, int) else piece
    return ids + (rendering.tokenizer.encode("<|im_end|>") if stops else [])


def stream(rendering: Rendering, ids: list[int], cuts: list[int]) -> tuple[Turn, list]:
    parser = rendering.parser(lambda index: f"call_{index}", [1], ())
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    deltas = []
    for start, end in itertools.pairwise(bounds):
        deltas += parser.feed(ids[start:end])
    deltas += parser.finish()
    said = AnswerSoFar()
    for delta in deltas:
        said.add(delta)
    return said.turn(), deltas


@given(completions(), st.lists(st.integers(0, 400), max_size=8))
def test_any_chunking_says_the_same(rendering, completion, cuts):
    ids = encode(rendering, *completion)
    whole, _ = stream(rendering, ids, [])
    cut, _ = stream(rendering, ids, cuts)
    one_by_one, _ = stream(rendering, ids, list(range(len(ids))))
    assert whole == cut == one_by_one


@given(completions())
def test_stream_equals_parse_response(rendering, completion):
    ids = encode(rendering, *completion)
    parsed = rendering.parse_whole(ids, [1], ())
    turn, deltas = stream(rendering, ids, list(range(len(ids))))
    assert (turn.reasoning or "") == parsed.reasoning
    shown = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert shown == parsed.text or shown.startswith((parsed.text + "\n<tool_call>", "<tool_call>\n" if not parsed.text else "\0"))
    valid = [block for block in parsed.blocks if block.is_valid]
    loadable = [use for use in turn.tool_uses if _loads(use.arguments) is not None]
    assert [use.name for use in loadable] == [block.name for block in valid]
    for use, block in zip(loadable, valid, strict=True):
        assert _loads(use.arguments) == (json.loads(block.arguments or "{}"),)


def test_bytes_that_are_no_text_do_not_wait_for_the_end(rendering):
    broken = rendering.tokenizer.encode("\u00ff")[:1]
    parser = rendering.parser(lambda index: f"call_{index}", [1], ())
    shown = [sum(len(delta.text) for delta in parser.feed(broken)) for _ in range(200)]
    assert sum(shown) >= 190 and max(shown) < 10


def _loads(text: str) -> tuple | None:
    try:
        return (json.loads(text),)
    except json.JSONDecodeError:
        return None


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))


@given(st.dictionaries(TEXT, st.one_of(TEXT, st.floats(allow_nan=False), st.none(), st.lists(TEXT, max_size=3))))
def test_arguments_stream_byte_for_byte(rendering, arguments):
    raw = json.dumps(arguments, ensure_ascii=False, indent=1)
    ids = rendering.tokenizer.encode(f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call><|im_end|>')
    turn, deltas = stream(rendering, ids, list(range(len(ids))))
    assert turn.tool_uses[0].arguments == raw
    first = next(at for at, delta in enumerate(deltas) if isinstance(delta, ToolStart))
    assert sum(isinstance(delta, ToolArguments) for delta in deltas[first:]) >= 1


@given(completions())
def test_whole_parser_ends_like_parse_response(rendering, completion):
    ids = encode(rendering, *completion)
    parser = WholeParser(lambda token_ids: rendering.parse_whole(token_ids, [1], ()), lambda index: f"call_{index}")
    said = AnswerSoFar()
    for token in ids:
        for delta in parser.feed([token]):
            said.add(delta)
    for delta in parser.finish():
        said.add(delta)
    parsed = rendering.parse_whole(ids, [1], ())
    assert (said.turn().reasoning or "") == parsed.reasoning
    assert [use.name for use in said.turn().tool_uses] == [block.name for block in parsed.blocks if block.is_valid]
