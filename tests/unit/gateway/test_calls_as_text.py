"""A client that wants no calls reads them as text: the same under any chunking, and of an answer that was cut a beginning of the whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest

from qwengyre.gateway.protocol.deltas import Delta, ReasoningDelta, TextDelta, ToolArguments, ToolStart
from qwengyre.gateway.protocol.wanted import CallsAsText
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.heard import events
from qwengyre.testing.tokenizers import write_byte_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {"b": [2, {}]}}\n</tool_call>'
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering.from_folder(write_byte_tokenizer(tmp_path_factory.mktemp("model")), {"name": "qwen3"})


def shown(rendering: Rendering, ids: Sequence[int], cuts: Sequence[int] = ()) -> str:
    parser = CallsAsText(rendering.parser(lambda index: f"call_{index}", [1], ()))
    deltas: list[Delta] = []
    for start, end in itertools.pairwise((0, *cuts, len(ids))):
        deltas += parser.feed(ids[start:end])
    deltas += parser.finish()
    assert all(isinstance(delta, TextDelta) for delta in deltas)
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("said", [f"{CALL}\n{OTHER}", f"Look.\n{CALL}\n{OTHER}"])
def test_an_answer_that_was_cut_shows_a_beginning_of_the_whole(rendering, said):
    """Wherever it is cut; so the second call begins on a line of its own before its name is known, too."""
    ids = rendering.tokenizer.encode(NO_THOUGHT + said)
    assert shown(rendering, ids) == said
    before, num_before = "", len(rendering.tokenizer.encode(NO_THOUGHT))
    for end in range(len(ids) + 1):
        text = shown(rendering, ids[:end])
        assert said.startswith(text) and text.startswith(before), end
        assert text == shown(rendering, ids[:end], range(1, end)), end
        written = rendering.tokenizer.decode(ids[num_before:end])
        assert text.startswith(written.rstrip()), "nothing is lost"
        before = text


@pytest.mark.parametrize(
    "cut", ["", "<tool_call>", "<tool_call>\n", '<tool_call>\n{"name', '<tool_call>\n{"name": "g", "arguments": {"b']
)
@pytest.mark.parametrize("before", ["", "Look.\n"])
def test_a_second_call_that_was_cut_stands_on_its_own_line_wherever_the_chunks_end(rendering, before, cut):
    ids = rendering.tokenizer.encode(f"{NO_THOUGHT}{before}{CALL}\n{cut}")
    wanted = f"{before}{CALL}\n{cut}".rstrip("\n") + ("\n" if cut in ("<tool_call>", "<tool_call>\n") else "")
    assert [at for at in range(len(ids) + 1) if shown(rendering, ids, [at]) != wanted] == []


class Told:
    """A parser that says what it was told to, one delta for each token."""

    cut_off = ""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._deltas = deltas

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        return [self._deltas[token] for token in token_ids]

    def finish(self) -> list[Delta]:
        return []


RUN = [ToolStart(index=0, id="0", name="f"), ToolArguments(index=0, text='{"a": '), ToolArguments(index=0, text='"1"}')]
AGAIN = [ToolStart(index=1, id="1", name="f"), ToolArguments(index=1, text='{"a": "1"}')]


@pytest.mark.parametrize(
    ("deltas", "text"),
    [
        ([*RUN, TextDelta(text="so"), TextDelta(text=" on")], f"{CALL}\nso on"),
        ([*RUN, TextDelta(text="\n"), TextDelta(text="so")], f"{CALL}\nso"),
        ([*RUN, TextDelta(text="\nso"), *AGAIN], f"{CALL}\nso\n{CALL}"),
        ([*RUN, ReasoningDelta(text="hm"), TextDelta(text="so")], f"{CALL}\nso"),
        ([*RUN, ReasoningDelta(text="hm"), *AGAIN, TextDelta(text="so")], f"{CALL}\n{CALL}\nso"),
        ([TextDelta(text="so"), TextDelta(text=" on"), *RUN], f"so on\n{CALL}"),
        ([*RUN, *AGAIN], f"{CALL}\n{CALL}"),
    ],
)
def test_text_behind_a_call_stands_on_a_line_of_its_own(deltas, text):
    """In formats where text goes on after a call, too."""
    for at in range(len(deltas) + 1):
        parser = CallsAsText(Told(deltas))
        said = [*parser.feed(range(at)), *parser.feed(range(at, len(deltas))), *parser.finish()]
        assert "".join(delta.text for delta in said if isinstance(delta, TextDelta)) == text, at


async def test_a_stream_and_a_whole_answer_say_the_same_of_a_second_call_that_was_cut(bench):
    said = f"{NO_THOUGHT}{CALL}\n<tool_call>\n"
    body = {"max_tokens": len(bench.ids(said)), "messages": [{"role": "user", "content": "hi"}], "tool_choice": "none"}
    body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    heard = []
    async with bench.running():
        for number, is_stream in enumerate((False, True)):
            live = await bench.open(f"e{number:06d}-0", engine=bench.says(said + OTHER))
            headers = {"authorization": f"Bearer {live.keys.key}"}
            sent = json.dumps({**body, "stream": is_stream}).encode()
            got = await begin(bench.harness_app, "POST", "/v1/chat/completions", headers=headers, body=sent).finish()
            said_so = [(event, "delta") for event in events(got.body)] if is_stream else [(json.loads(got.body), "message")]
            choices = [choice[kind] for answer, kind in said_so for choice in answer["choices"]]
            heard.append("".join(choice.get("content") or "" for choice in choices))
    assert heard == [f"{CALL}\n<tool_call>\n"] * 2
