"""Clients of Responses may name an item of an earlier answer instead of sending it, as the Vercel AI SDK does by default."""

from __future__ import annotations

import json

import pytest

from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.heard import events
from tests.unit.gateway.conftest import Bench

CALL = '<tool_call>\n{"name": "run", "arguments": {"a":  1}}\n</tool_call>'
SAID = f"<think>\nso\n</think>\n\nLook.\n{CALL}\n{CALL}<|im_end|>"
TOOLS = [{"type": "function", "name": "run", "parameters": {"type": "object"}}]


async def post(bench, execution, given, **more):
    body = json.dumps({"input": given, "tools": TOOLS, **more}).encode()
    headers = {"x-api-key": execution.keys.key}
    return await begin(bench.harness_app, "POST", "/v1/responses", headers=headers, body=body).finish()


def items_of(exchange) -> list[dict]:
    if exchange.body.startswith(b"{"):
        return json.loads(exchange.body)["output"]
    return [json.loads(line[6:])["item"] for line in exchange.body.splitlines() if b'"response.output_item.done"' in line[:60]]


def reference(item: dict) -> dict:
    return {"type": "item_reference", "id": item["id"]}


@pytest.fixture
def keeps_reasoning(model):
    return Rendering.from_folder(model, {"name": "qwen3", "thinking_retention": "all"})


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refer", [reference, lambda item: {"id": item["id"]}, lambda item: {"type": None, "id": item["id"]}])
async def test_a_turn_that_refers_to_all_items_extends_the_answer(keeps_reasoning, tmp_path, stream, refer, is_restarted):
    def bench():
        return Bench(keeps_reasoning, tmp_path, GatewayConfig(max_context_tokens=100_000))

    given = [{"role": "user", "content": "hi"}]

    async def go_on(bench, items):
        execution = await bench.open(engine=bench.says("done<|im_end|>"))
        outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "r"} for item in items[2:]]
        got = await post(bench, execution, [*given, *map(refer, items), *outputs], stream=stream)
        assert got.status == 200, got.body
        calls = await bench.gateway.close(execution.id)
        assert calls[1].started.cause == "extends" and calls[1].started.base == 0
        assert SAID in bench.text(calls.sequence(1, calls[1].num_prompt).tolist())

    first = bench()
    async with first.running():
        execution = await first.open(engine=first.says(SAID))
        items = items_of(await post(first, execution, given, stream=stream))
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        if not is_restarted:
            await go_on(first, items)
    if is_restarted:
        second = bench()
        async with second.running():
            await go_on(second, items)


async def test_an_answer_that_said_nothing_can_be_referred_to(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("<|im_end|>", "ok<|im_end|>"))
        given = [{"role": "user", "content": "hi"}]
        (item,) = items_of(await post(bench, execution, given))
        got = await post(bench, execution, [*given, reference(item), {"role": "user", "content": "and?"}])
        assert got.status == 200


@pytest.mark.parametrize(
    "item_id", ["", "msg", "msg_x_0", "msg_e000001-0-c0_9", "msg_e000001-0-c0_-1", "msg_e000001-0-c0_\u0661", "_" * 9]
)
async def test_a_reference_to_nothing_is_refused_with_what_to_do(bench, item_id):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        given = [{"role": "user", "content": "hi"}]
        await post(bench, execution, given)
        got = await post(bench, execution, [*given, {"type": "item_reference", "id": item_id}])
        assert got.status == 400 and "send the item itself" in json.loads(got.body)["error"]["message"]


async def test_nobody_can_refer_to_an_item_of_another_execution(bench):
    async with bench.running():
        first = await bench.open(engine=bench.says("secret<|im_end|>", "x<|im_end|>"))
        (item,) = items_of(await post(bench, first, "hi"))
        second = await bench.open("e000002-0")
        second.route.set("cell-0")
        got = await post(bench, second, [{"role": "user", "content": "hi"}, reference(item)])
        assert got.status == 400 and b"secret" not in got.body


REQUIRED = {"id", "created_at", "error", "incomplete_details", "instructions", "metadata", "model", "object", "output", "parallel_tool_calls",
            "temperature", "tool_choice", "tools", "top_p", "max_output_tokens", "previous_response_id", "reasoning", "status", "text",
            "truncation", "usage", "user"}  # fmt: skip
"""Of a Response, by the published schema; litellm 1.75 refuses an answer without one of them."""


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_every_field_that_clients_require(bench, stream):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        async with bench.http(execution) as http:
            answer = await http.post("/responses", json={"model": "m", "input": "hi", "stream": stream})
        said = list(events(answer.content))[-1]["response"] if stream else answer.json()
        assert said.keys() >= REQUIRED
