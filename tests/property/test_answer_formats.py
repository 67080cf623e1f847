"""Every renderer's answers: what a client is told piece by piece is what `parse_response` reads in the whole, in any chunking."""

from __future__ import annotations

import json
import random

import pytest

from qwengyre.gateway.protocol.deltas import ReasoningDelta, TextDelta, ToolArguments, ToolStart
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.answers import TOOLS, difference, prompt_tails, random_answer, streamed
from qwengyre.testing.renderers import ANSWER_FORMATS, write_renderer_model

NUM_ANSWERS = 60
PLAIN_MARKUP = ("deepseek-v3", "kimi-k2", "kimi-k2.5")
"""Real tokenizers of these have no tokens for `<think>`: it is text."""
CASES = [(name, True) for name in ANSWER_FORMATS] + [(name, False) for name in PLAIN_MARKUP]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0] if case[1] else f"{case[0]}-plain")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Rendering]:
    name, has_markup = request.param
    folder = write_renderer_model(tmp_path_factory.mktemp("model"), name, has_markup=has_markup)
    return name, Rendering.from_folder(folder, {"name": name})


def test_answers_of_any_kind_are_told_as_they_are_read(case):
    name, rendering = case
    rnd = random.Random(name)
    tails = prompt_tails(rendering, name)
    for _ in range(NUM_ANSWERS):
        ids = random_answer(rnd, name, rendering)
        tail, tools = rnd.choice(tails), rnd.choice(((), TOOLS))
        found = difference(rendering, name, ids, tail, tools)
        assert found is None, (rendering.tokenizer.decode(ids), found)


def test_any_chunking_tells_the_same(case):
    name, rendering = case
    rnd = random.Random(f"{name} cut")
    tails = prompt_tails(rendering, name)
    for _ in range(NUM_ANSWERS):
        ids = random_answer(rnd, name, rendering)
        tail, tools = rnd.choice(tails), rnd.choice(((), TOOLS))
        cuts = [rnd.randrange(len(ids) + 1) for _ in range(rnd.randrange(6))]
        one_by_one = streamed(rendering, ids, range(len(ids)), tail, tools).turn
        assert one_by_one == streamed(rendering, ids, cuts, tail, tools).turn == streamed(rendering, ids, (), tail, tools).turn


def test_good_answer_is_told_whole_in_the_order_of_its_blocks(case):
    name, rendering = case
    form = ANSWER_FORMATS[name]
    calls = (("run", {"cmd": "ls -la \u00e9", "n": 5, "b": True}),)
    said = form.write(thought="Let me see.", text="I look." if name != "llama-3" else "", calls=calls)
    told = streamed(rendering, rendering.tokenizer.encode(said), range(2000), [1], TOOLS)
    [use] = told.turn.tool_uses
    assert (use.name, json.loads(use.arguments)) == ("run", calls[0][1])
    kinds = list(dict.fromkeys(type(delta) for delta in told.deltas))
    if name == "llama-3":
        assert kinds == [ToolStart, ToolArguments]
        return
    assert (told.turn.reasoning, told.turn.text.strip()) == ("Let me see.", "I look.")
    assert kinds == [ReasoningDelta, TextDelta, ToolStart, ToolArguments]


def test_texts_and_arguments_are_told_while_they_come(case):
    """A long argument comes in many pieces. Llama 3's call is known for one when it has ended."""
    name, rendering = case
    said = ANSWER_FORMATS[name].write(thought="think " * 50, text="say " * 50, calls=(("run", {"cmd": "do " * 300}),))
    deltas = streamed(rendering, rendering.tokenizer.encode(said), range(4000), [1], TOOLS).deltas
    num = {kind: sum(isinstance(delta, kind) for delta in deltas) for kind in (ReasoningDelta, TextDelta, ToolArguments)}
    assert num[TextDelta] > 50
    if name != "llama-3":
        assert num[ReasoningDelta] > 50 and num[ToolArguments] > 50


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nope", {"cmd": "ls"}),
        ("run", {"cmd": "ls", "timeout": 5}),
        ("run", {"n": 5}),
        ("run", {"cmd": "ls", "n": "five"}),
        ("run", {"cmd": "ls", "b": "True"}),
        ("run", {"cmd": ""}),
        ("run", {}),
    ],
    ids=("unknown tool", "undeclared argument", "missing argument", "wrong type", "boolean as True", "empty", "none"),
)
def test_call_that_the_harness_will_object_to_is_told_as_it_was_written(case, name, arguments):
    renderer, rendering = case
    said = ANSWER_FORMATS[renderer].write(calls=((name, arguments),))
    [use] = streamed(rendering, rendering.tokenizer.encode(said), range(2000), [1], TOOLS).turn.tool_uses
    assert (use.name, json.loads(use.arguments)) == (name, arguments)


def test_long_string_that_is_never_closed_breaks_its_call(tmp_path):
    """`parse_response` drops it. The harness has seen it come, so that its call must not look whole without it."""
    rendering = Rendering.from_folder(write_renderer_model(tmp_path, "qwen3.5"), {"name": "qwen3.5"})
    said = f"<tool_call>\n<function=run>\n<parameter=cmd>\n{'ls ' * 100}</function>\n</tool_call><|im_end|>"
    [use] = streamed(rendering, rendering.tokenizer.encode(said), range(2000), [1], TOOLS).turn.tool_uses
    assert use.name == "run" and use.arguments.startswith('{"cmd": "ls ls') and not use.arguments.endswith("}")
