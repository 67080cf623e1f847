"""What was sampled after a stop string is recorded, masked, and never context; what came before it counts and goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.protocol.deltas import TextDelta
from qwengyre.gateway.protocol.text import Detokenizer, Trimmed
from qwengyre.gateway.rendering import Rendering
from qwengyre.gateway.seen import Seen, seen_until
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.match import Turn
from qwengyre.trajectory.tree import TrajectoryTree
from tests.unit.gateway.conftest import Bench

SEEN = "Thought: list.\nAction: ls"
SAID = f"{SEEN}\nObservation: made-up.txt\nThought: done.<|im_end|>"
STOP = "\nObservation:"
GOES_ON = "Thought: read.\nAction: cat<|im_end|>"


def chat(messages, **more):
    return "/v1/chat/completions", {"messages": messages, "stop": [STOP], **more}


def messages(turns, **more):
    return "/v1/messages", {"messages": turns, "stop_sequences": [STOP], "max_tokens": 900, **more}


def text_in(exchange) -> str:
    """The text of an answer that was not streamed, in either dialect."""
    body = json.loads(exchange.body)
    return body["choices"][0]["message"]["content"] if "choices" in body else body["content"][0]["text"]


async def ask(bench, execution, request):
    path, body = request
    return await begin(
        bench.harness_app, "POST", path, headers={"x-api-key": execution.keys.key}, body=json.dumps(body).encode()
    ).finish()


async def two_turns(bench, execution, dialect) -> list:
    """A ReAct harness: what it was given, then its own observation."""
    turns = [{"role": "user", "content": "List the files."}]
    first = await ask(bench, execution, dialect(turns))
    turns += [{"role": "assistant", "content": text_in(first)}, {"role": "user", "content": "Observation: a.py"}]
    return [first, await ask(bench, execution, dialect(turns))]


def trained(bench, calls) -> list[str]:
    """Text of the tokens of each call that may be trained."""
    tree = TrajectoryTree(calls)
    tree.validate()
    found = {call: "" for call in tree.calls}
    for node in tree.nodes:
        for span in node.spans:
            if span.trainable:
                found[span.call] += bench.text(node.token_ids[span.start : span.stop].tolist())
    return list(found.values())


def prompt(bench, calls, number: int) -> str:
    return bench.text(calls.sequence(number, calls[number].num_prompt).tolist())


def qwen3_that_keeps_reasoning(folder: Path) -> Rendering:
    return Rendering.from_folder(folder, {"name": "qwen3", "thinking_retention": "all"})


@pytest.mark.parametrize("dialect", [chat, messages])
@pytest.mark.parametrize("tokens_per_chunk", [1, 7, 500])
async def test_the_next_prompt_goes_on_before_the_stop_string(model, tmp_path, dialect, tokens_per_chunk):
    bench = Bench(qwen3_that_keeps_reasoning(model), tmp_path, GatewayConfig(max_context_tokens=100_000))

    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID, GOES_ON, tokens_per_chunk=tokens_per_chunk))
        first, _ = await two_turns(bench, execution, dialect)
        assert text_in(first) == SEEN
        calls = await bench.gateway.close(execution.id)
        assert calls[1].started.cause == "extends"
        assert f"{SEEN}<|im_end|>\n<|im_start|>user\nObservation: a.py<|im_end|>" in prompt(bench, calls, 1)
        assert bench.text(calls.answer_ids(0)).startswith(f"{SEEN}{STOP}"), "it is recorded"
        assert trained(bench, calls) == [SEEN, GOES_ON]


async def test_usage_counts_what_the_client_got(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID, tokens_per_chunk=500))
        answer = await ask(bench, execution, chat([{"role": "user", "content": "hi"}]))
        assert json.loads(answer.body)["usage"]["completion_tokens"] == len(bench.ids(SEEN))


async def test_an_answer_without_the_stop_string_is_whole(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("Action: ls\nObserve<|im_end|>"))
        answer = await ask(bench, execution, chat([{"role": "user", "content": "hi"}]))
        assert text_in(answer) == "Action: ls\nObserve"
        calls = await bench.gateway.close(execution.id)
        assert trained(bench, calls) == ["Action: ls\nObserve<|im_end|>"]


async def test_text_held_back_for_a_stop_string_comes_before_a_tool_call(bench):
    async with bench.running():
        call = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
        execution = await bench.open(engine=bench.says(f"Plan: END{call}<|im_end|>"))
        tools = [{"name": "run", "input_schema": {"type": "object"}}]
        request = messages([{"role": "user", "content": "hi"}], stop_sequences=["ENDE"], tools=tools, stream=True)
        answer = await ask(bench, execution, request)
        assert answer.body.index(b'"text":"END"') < answer.body.index(b'"tool_use"')


async def test_a_client_that_hangs_up_never_saw_what_may_have_become_a_stop_string(bench):
    """Its next turn goes on after the text that it has; a retry goes on with every token, up to the stop string."""

    async with bench.running():
        engine = bench.says(SAID, GOES_ON, held=True)
        execution = await bench.open(engine=engine)
        path, body = chat([{"role": "user", "content": "hi"}], stream=True)
        headers = {"x-api-key": execution.keys.key}
        cut = begin(bench.harness_app, "POST", path, headers=headers, body=json.dumps(body).encode())
        await engine.grant("e000001-0/c0#1", len(bench.ids(f"{SEEN}\nObs")))
        while not (execution.live and execution.live[0].num_answer == len(bench.ids(f"{SEEN}\nObs"))):
            await asyncio.sleep(0)
        answer = execution.live[0].answer
        while not all(reader.position == len(answer.deltas) for reader in answer.readers):
            await asyncio.sleep(0)
        await cut.hang_up()
        await engine.grant("e000001-0/c1#1", 1000)
        retried = await ask(bench, execution, chat([{"role": "user", "content": "hi"}]))
        assert text_in(retried) == SEEN
        calls = await bench.gateway.close(execution.id)
        assert calls[0].finished.num_seen == len(bench.ids(SEEN))
        assert trained(bench, calls) == [SEEN, ""], "what the retry masks was sampled by the call before it"


async def test_a_restarted_gateway_still_knows_an_answer_that_a_stop_string_ended(model, tmp_path):
    def bench():
        return Bench(qwen3_that_keeps_reasoning(model), tmp_path, GatewayConfig(max_context_tokens=100_000))

    turns = [{"role": "user", "content": "hi"}]

    async def begin_run(bench):
        async with bench.running():
            execution = await bench.open(engine=bench.says(SAID, tokens_per_chunk=500))
            return text_in(await ask(bench, execution, chat(turns)))

    async def go_on(bench, text):
        async with bench.running():
            execution = await bench.open(engine=bench.says(GOES_ON))
            again = [*turns, {"role": "assistant", "content": text}, {"role": "user", "content": "Observation: a.py"}]
            await ask(bench, execution, chat(again))
            calls = await bench.gateway.close(execution.id)
            assert (calls[1].started.cause, "made-up" in prompt(bench, calls, 1)) == ("extends", False)
            assert trained(bench, calls) == [SEEN, GOES_ON]

    text = await begin_run(bench())
    await go_on(bench(), text)


async def test_a_gateway_killed_in_mid_answer_masks_what_came_after_the_stop_string(model, tmp_path):
    """The end of the call was never journalled, its tokens were."""

    def bench():
        return Bench(qwen3_that_keeps_reasoning(model), tmp_path, GatewayConfig(max_context_tokens=100_000))

    turns = [{"role": "user", "content": "hi"}]

    async def begin_run(bench):
        async with bench.running():
            said = SAID.removesuffix("<|im_end|>")
            engine = bench.says(f"{said} and more", held=True, tokens_per_chunk=len(said))
            execution = await bench.open(engine=engine)
            engine.abort = lambda requests: asyncio.sleep(0)
            path, body = chat(turns)
            exchange = begin(
                bench.harness_app, "POST", path, headers={"x-api-key": execution.keys.key}, body=json.dumps(body).encode()
            )
            await engine.grant("e000001-0/c0#1", len(said))
            while not (execution.live and execution.live[0].num_answer):
                await asyncio.sleep(0)
            exchange.task.cancel()

    async def look(bench):
        async with bench.running():
            (ended,) = [call.finished for call in bench.gateway.executions["e000001-0"].session.calls]
            assert ended.num_seen == len(bench.ids(SEEN)) and ended.num_masked == ended.num_sampled - ended.num_seen

    await begin_run(bench())
    await look(bench())


class PlainParser:
    """Every token is text; outer whitespace is held back."""

    def __init__(self, decode):
        self._detokenizer, self._trimmed = Detokenizer(decode), Trimmed()

    def feed(self, token_ids):
        return [TextDelta(text=self._trimmed.push(self._detokenizer.push(token_ids)))]

    def finish(self):
        return [TextDelta(text=self._trimmed.push(self._detokenizer.flush()))]


PIECES = ["Action:", " ", "ls", "ls\n", "\n", "Observ", "ation:", "\nObservation:", " x", "a\nO", "bservation", "é"]


@pytest.mark.parametrize(
    ("pieces", "shown", "num_tokens", "rest"),
    [
        (["Action:", " ", "ls", "\n", "Observ", "ation:"], "Action: ls", 3, ""),
        (["Action:", " ", "ls", "\nObservation:", " x"], "Action: ls", 3, ""),
        (["Action:", " ", "ls\n", "Observ", "ation:"], "Action: ls", 1, " ls"),
        (["Action:", " ", "ls\n", "Observ", "ation:"], "Action: ls\n", 3, ""),
        (["Action:", " ", "ls", "\n", "\n", "Observ"], "Action: ls\n", 4, ""),
        (["Action:", "a\nO", "bservation"], "Action:a", 1, "a"),
        (["Action:", "\n", "a\nO", "bservation"], "Action:\na", 1, "\na"),
        (["\nObservation:", " x"], "", 0, ""),
        (["a\nO", "bservation"], "a", 0, "a"),
        (["é", "é", "\n", "Observ"], "éé", 2, ""),
    ],
)
def test_tokens_end_before_the_one_in_which_the_stop_string_begins(pieces, shown, num_tokens, rest):
    def decode(token_ids):
        return "".join(PIECES[token] for token in token_ids)

    token_ids = [PIECES.index(piece) for piece in pieces]
    assert seen_until(token_ids, Turn(role="assistant", text=shown), lambda: PlainParser(decode), decode) == Seen(
        num_tokens, rest
    )


async def test_the_first_half_of_a_token_that_the_stop_string_cut_is_context_again(tmp_path):
    """`ls` and a line break are one token: the harness saw the one and not the other."""
    folder = write_byte_tokenizer(tmp_path / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "s"), ("ls", "Ċ")]
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "ls", "lsĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in byte_tokenizer().get_added_tokens_decoder().values():
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    bench = Bench(qwen3_that_keeps_reasoning(folder), tmp_path, GatewayConfig(max_context_tokens=100_000))

    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID, GOES_ON, tokens_per_chunk=3))
        await two_turns(bench, execution, chat)
        calls = await bench.gateway.close(execution.id)
        assert calls[1].started.cause == "extends"
        assert f"{SEEN}<|im_end|>\n<|im_start|>user" in prompt(bench, calls, 1)
        assert trained(bench, calls) == ["Thought: list.\nAction:", GOES_ON]
