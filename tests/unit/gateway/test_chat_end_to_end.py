from __future__ import annotations

import asyncio

import openai
import pytest

from qwengyre.core.errors import ConfigError, UnknownExecution
from qwengyre.gateway.control_api import CloseExecution, MoveCalls, OpenExecution, RemoveServer, ReportCounts, SetRoutes
from qwengyre.gateway.moves import move
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.trajectory.records import CallFinished, CallStarted, TokensSampled
from qwengyre.transfer.shm import ShmTransport

TOOLS = [{"type": "function", "function": {"name": "run", "description": "Run it", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "hi"}


def client(bench, execution) -> openai.AsyncOpenAI:
    http = bench.http()
    return openai.AsyncOpenAI(api_key=execution.keys.key, base_url="http://gateway/v1", http_client=http, max_retries=0)


async def test_openai_client_gets_text_reasoning_and_usage(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("<think>\nso\n</think>\n\nHello!<|im_end|>"))
        answer = await client(bench, execution).chat.completions.create(model="m", messages=[USER])
        assert answer.choices[0].message.content == "Hello!"
        assert answer.choices[0].message.reasoning_content == "so"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(bench.ids("<think>\nso\n</think>\n\nHello!<|im_end|>"))


async def test_openai_client_streams_tool_calls(bench):
    async with bench.running():
        said = 'Run.\n<tool_call>\n{"name": "run", "arguments": {"cmd":  "ls \\"a\\"" }}\n</tool_call><|im_end|>'
        execution = await bench.open(engine=bench.says(said))
        stream = await client(bench, execution).chat.completions.create(
            model="m", messages=[USER], tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        text, arguments, names, reasons, usage = "", "", [], [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
                for call in choice.delta.tool_calls or ():
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments or ""
        assert (text, names, reasons) == ("Run.", ["run"], ["tool_calls"])
        assert arguments == '{"cmd":  "ls \\"a\\"" }'
        assert usage.completion_tokens == len(bench.ids(said))


async def test_second_call_extends_the_sampled_tokens(bench):
    async with bench.running():
        first = '<tool_call>\n{"name": "run", "arguments": {"b": 1,  "a": 2}}\n</tool_call><|im_end|>'
        engine = bench.says(first, "Done.<|im_end|>")
        execution = await bench.open(engine=engine)
        ai = client(bench, execution)
        answer = await ai.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        call = answer.choices[0].message.tool_calls[0]
        rewritten = {"id": call.id, "type": "function", "function": {"name": "run", "arguments": '{"a":2,"b":1}'}}
        history = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [rewritten]},
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ]
        await ai.chat.completions.create(model="m", messages=history, tools=TOOLS)
        prompt = bench.text(list(memoryview(engine.requests[1].token_ids).cast("i")))
        assert first in prompt
        assert prompt.endswith("<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
        events = (await bench.gateway.close(execution.id)).records()
        starts = [event for event in events if isinstance(event, CallStarted)]
        assert [start.base for start in starts] == [-1, starts[0].call]
        assert [start.cause.value for start in starts] == ["root", "extends"]
        sampled = [event for event in events if isinstance(event, TokensSampled)]
        assert bench.text(list(memoryview(sampled[0].token_ids).cast("i"))) == first
        assert [event.abandoned for event in events if isinstance(event, CallFinished)] == [False, False]


async def test_calls_wait_for_a_route_and_move_in_mid_answer(bench):
    async with bench.running():
        said = "one two three four<|im_end|>"
        source = bench.says(said, held=True)
        destination = bench.says()
        destination._script = source._script
        execution = await bench.open()
        ai = client(bench, execution)
        asking = asyncio.ensure_future(ai.chat.completions.create(model="m", messages=[USER]))
        await bench.gateway.set_server("cell-0", source)
        await bench.gateway.set_server("cell-1", destination)
        while not execution.live:
            await asyncio.sleep(0)
        execution.route.set("cell-0")
        await source.grant("e000001-0/c0#1", 5)
        live = execution.live[0]
        while live.tokens.num_sampled < 5:
            await asyncio.sleep(0)
        assert (await bench.ask(MoveCalls("cell-0", {"e000001-0": "cell-1"}))).calls_moved == 1
        answer = await asking
        assert answer.choices[0].message.content == "one two three four"
        assert destination.requests[0].sampling.first_index == 5
        closed = await bench.gateway.close(execution.id)
        assert [(span.start, span.server) for span in closed[0].runs] == [(0, "cell-0"), (5, "cell-1")]
        assert bench.gateway.stats.calls_moved == 1


async def test_errors_are_in_the_dialect(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("x<|im_end|>"), max_context_tokens=40)
        async with bench.http(execution) as http:
            long = await http.post("/chat/completions", json={"messages": [{"role": "user", "content": "y" * 100}]})
            assert long.status_code == 400
            assert long.json()["error"]["code"] == "context_length_exceeded"
            assert "prompt is too long: " in long.json()["error"]["message"]
            bad = await http.post("/chat/completions", content=b'{"messages": [')
            assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
            missing = await http.post("/nothing", json={})
            assert missing.status_code == 404
        async with bench.http() as nobody:
            refused = await nobody.post("/chat/completions", json={}, headers={"authorization": "Bearer sk-wrong"})
            assert refused.status_code == 401


async def test_its_owner_opens_moves_asks_and_closes(bench):
    async with bench.running():
        opened = await bench.ask(OpenExecution("e000009-1", seed=3))
        assert opened.path.startswith("/e/") and opened.key.startswith("sk-qg-")
        assert await bench.ask(OpenExecution("e000009-1", seed=3)) == opened
        higher = await bench.ask(OpenExecution("e000009-1", attempt=1, server="cell-3"))
        assert higher.key != opened.key
        assert bench.gateway.by_key(opened.key) is None
        with pytest.raises(ConfigError, match="attempt 1 already"):
            await bench.ask(OpenExecution("e000009-1", attempt=0))
        route = bench.gateway.executions["e000009-1"].route
        assert route.server == "cell-3"
        await bench.ask(SetRoutes({"e000009-1": None, "closed-meanwhile": "cell-3"}))
        assert route.server is None
        assert (await bench.ask(ReportCounts())).stats == bench.gateway.stats
        closed = await bench.ask(CloseExecution("e000009-1"))
        assert closed.records == [] and closed.opened.attempt == 1
        assert bench.gateway.by_key(higher.key) is None
        assert await bench.ask(CloseExecution("e000009-1")) == closed
        with pytest.raises(UnknownExecution, match="nobody was never opened here"):
            await bench.ask(CloseExecution("nobody"))


class Broken(ScriptedEngine):
    async def close(self) -> None:
        raise KeyError("a bug of its own")


async def test_a_bug_is_not_an_execution_that_nobody_opened(bench):
    async with bench.running():
        await bench.gateway.set_server("cell-0", Broken())
        with pytest.raises(KeyError, match="a bug of its own"):
            await bench.ask(RemoveServer("cell-0"))


@pytest.mark.parametrize("stop", ["three", ["nothing", "three"]])
async def test_stop_strings_hide_but_record_tokens(bench, stop):
    async with bench.running():
        engine = bench.says("one two three four<|im_end|>", tokens_per_chunk=40)
        execution = await bench.open(engine=engine)
        answer = await client(bench, execution).chat.completions.create(model="m", messages=[USER], stop=stop)
        assert answer.choices[0].message.content == "one two "
        assert answer.choices[0].finish_reason == "stop"
        closed = await bench.gateway.close(execution.id)
        assert "three" in bench.text(closed.answer_ids(0))


async def test_a_move_carries_the_kv_so_that_nothing_is_computed_twice(bench, prefix):
    async with bench.running():
        transport = ShmTransport(prefix)
        source, destination = (bench.says("one two three<|im_end|>", held=True, transport=transport) for _ in range(2))
        destination._script = source._script
        execution = await bench.open(engine=source)
        await bench.gateway.set_server("cell-1", destination)
        asking = asyncio.ensure_future(client(bench, execution).chat.completions.create(model="m", messages=[USER]))
        await source.grant("e000001-0/c0#1", 4)
        while not (execution.live and execution.live[0].tokens.num_sampled == 4):
            await asyncio.sleep(0)
        moved = await move(bench.gateway, MoveCalls("cell-0", {execution.id: "cell-1"}))
        await destination.grant("e000001-0/c0#2", 100)
        assert (await asking).choices[0].message.content == "one two three"
        row = execution.session.calls[0]
        assert (moved.calls_moved, moved.tokens_moved, moved.tokens_recomputed) == (1, row.num_prompt + 3, 0)
        assert bench.gateway.stats.tokens_recomputed_after_move == 0
        assert destination.stats().tokens_prefilled == 1
        [call] = await bench.gateway.close(execution.id)
        assert call.finished.num_moves == 1, "what a run's report adds up is what its gateway moved"
        transport.close()
