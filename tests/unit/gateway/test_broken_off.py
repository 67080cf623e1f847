"""A client that hangs up, or stops reading, at a whole tool call, and goes on from there: the answer is known."""

from __future__ import annotations

import asyncio
import json

import pytest

from qwengyre.gateway.dialects import BY_NAME
from qwengyre.testing.asgi_client import begin
from qwengyre.trajectory.tree import TrajectoryTree

CALL = '<tool_call>\n{{"name": "run", "arguments": {{"a": {}}}}}\n</tool_call>'
FIRST, SECOND = CALL.format(1), CALL.format(2)
SAID = f"Look.\n{FIRST}\n{SECOND}\nand much more text"
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}],
    "messages": [{"name": "run", "input_schema": {"type": "object"}}],
    "responses": [{"type": "function", "name": "run", "parameters": {"type": "object"}}],
}


def asked(name: str, history: list) -> bytes:
    key = "input" if name == "responses" else "messages"
    body = {key: [{"role": "user", "content": "hi"}, *history], "tools": TOOLS[name], "stream": True}
    return json.dumps(body).encode()


def history_after(name: str, call_id: str) -> list:
    """As a harness has it that took the text and the first call."""
    match name:
        case "chat":
            call = {"id": call_id, "type": "function", "function": {"name": "run", "arguments": '{"a":1}'}}
            return [
                {"role": "assistant", "content": "Look.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call_id, "content": "r"},
            ]
        case "messages":
            use = {"type": "tool_use", "id": call_id, "name": "run", "input": {"a": 1}}
            return [
                {"role": "assistant", "content": [{"type": "text", "text": "Look."}, use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "r"}]},
            ]
    return [
        {"role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": call_id, "name": "run", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": call_id, "output": "r"},
    ]


def post(bench, execution, name: str, body: bytes):
    return begin(bench.harness_app, "POST", f"/v1/{BY_NAME[name].path}", headers={"x-api-key": execution.keys.key}, body=body)


async def until_sampled(execution, num_tokens: int) -> None:
    while not (execution.live and execution.live[0].tokens.num_sampled == num_tokens):
        await asyncio.sleep(0)
    call = execution.live[0]
    while not all(reader.position == len(call.answer.deltas) for reader in call.answer.readers):
        await asyncio.sleep(0)


UP_TO = {
    "arguments": f"Look.\n{FIRST}".removesuffix("\n</tool_call>"),
    "call": f"Look.\n{FIRST}",
    "second call begun": f"Look.\n{FIRST}\n{SECOND}".removesuffix("2}}\n</tool_call>"),
    "second call": f"Look.\n{FIRST}\n{SECOND}",
}


@pytest.mark.parametrize("has_hung_up", [True, False])
@pytest.mark.parametrize("up_to", UP_TO)
@pytest.mark.parametrize("name", TOOLS)
async def test_the_next_turn_goes_on_while_the_engine_still_owes_tokens(bench, name, up_to, has_hung_up):
    async with bench.running():
        engine = bench.says(SAID, "done<|im_end|>", held=True)
        execution = await bench.open(engine=engine)
        is_over = asyncio.Event()
        engine.abort = lambda requests: is_over.wait()
        cut = post(bench, execution, name, asked(name, []))
        num_tokens = len(bench.ids(UP_TO[up_to]))
        await engine.grant("e000001-0/c0#1", num_tokens)
        await until_sampled(execution, num_tokens)
        if has_hung_up:
            await cut.hang_up()
        call_id = execution.session.tool_use_id(execution.session.calls[0].started, 0)
        assert call_id.encode() in cut.body
        await engine.grant("e000001-0/c1#1", 100)
        got = await post(bench, execution, name, asked(name, history_after(name, call_id))).finish()
        assert got.status == 200, got.body
        row = execution.session.calls[1]
        assert (row.started.cause, row.started.base) == ("extends", 0)
        prompt = bench.text(execution.session.calls.sequence(1, row.num_prompt).tolist())
        assert f"Look.\n{FIRST}<|im_end|>\n<|im_start|>user\n<tool_response>\nr" in prompt and SECOND not in prompt
        is_over.set()


@pytest.mark.parametrize("name", TOOLS)
async def test_what_the_client_went_on_from_is_trained_and_nothing_after_it(bench, name):
    async with bench.running():
        engine = bench.says(SAID, "done<|im_end|>", held=True)
        execution = await bench.open(engine=engine)
        cut = post(bench, execution, name, asked(name, []))
        num_tokens = len(bench.ids(f"Look.\n{FIRST}\n{SECOND}"))
        await engine.grant("e000001-0/c0#1", num_tokens)
        await until_sampled(execution, num_tokens)
        await cut.hang_up()
        call_id = execution.session.tool_use_id(execution.session.calls[0].started, 0)
        await engine.grant("e000001-0/c1#1", 100)
        await post(bench, execution, name, asked(name, history_after(name, call_id))).finish()
        tree = TrajectoryTree(await bench.gateway.close(execution.id))
        tree.validate()
        trained = [
            bench.text(node.token_ids[span.start : span.stop].tolist())
            for node in tree.nodes
            for span in node.spans
            if span.trainable
        ]
        assert sorted(trained) == [f"Look.\n{FIRST}", "done<|im_end|>"]
