"""Text after a tool call keeps its place, streamed or whole, and the answer is known when it comes back."""

from __future__ import annotations

import json

import openai
import pytest

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}
SAID = 'Look.\n<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>\n<tool_call>\n{"nam: "x"\n</tool_call><|im_end|>'


@pytest.mark.parametrize("streams", [False, True], ids=("whole", "streamed"))
@pytest.mark.parametrize("keeps_ids", [False, True], ids=("without ids", "with ids"))
async def test_responses_keep_the_order_of_items(bench, streams, keeps_ids):
    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID, "done<|im_end|>"))
        client = openai.AsyncOpenAI(
            api_key=execution.keys.key, base_url="http://gateway/v1", http_client=bench.http(), max_retries=0
        )
        tools = [{"type": "function", "name": "run", "parameters": PARAMETERS, "strict": False}]
        if streams:
            async with client.responses.stream(model="m", input="go", tools=tools) as stream:
                output = (await stream.get_final_response()).output
        else:
            output = (await client.responses.create(model="m", input="go", tools=tools)).output
        assert [item.type for item in output] == ["message", "function_call", "message"]
        dropped = {"parsed_arguments", "parsed"} | (set() if keeps_ids else {"id"})
        items = [
            {key: value for key, value in item.model_dump(exclude_none=True).items() if key not in dropped} for item in output
        ]
        result = {"type": "function_call_output", "call_id": output[1].call_id, "output": "r"}
        again = [{"role": "user", "content": "go"}, *items, result]
        await client.responses.create(model="m", input=again, tools=tools)
        assert [call.started.cause for call in execution.session.calls] == ["root", "extends"]


@pytest.mark.parametrize("streams", [False, True], ids=("whole", "streamed"))
async def test_messages_keep_the_order_of_blocks(bench, streams):
    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID, "done<|im_end|>"))
        headers = {"x-api-key": execution.keys.key}
        tools = [{"name": "run", "input_schema": PARAMETERS}]
        asked = {"model": "m", "max_tokens": 500, "tools": tools, "messages": [{"role": "user", "content": "go"}]}
        async with bench.http() as http:
            answer = await http.post("/v1/messages", json=asked | {"stream": streams}, headers=headers)
            content = blocks_of(answer.text) if streams else answer.json()["content"]
            assert [block["type"] for block in content] == ["text", "tool_use", "text"]
            result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "r"}
            history = [*asked["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
            await http.post("/v1/messages", json=asked | {"messages": history}, headers=headers)
        assert [call.started.cause for call in execution.session.calls] == ["root", "extends"]


def blocks_of(events: str) -> list[dict]:
    """The content that a client puts together of a stream."""
    blocks: list[dict] = []
    for line in events.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        match event.get("type"):
            case "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                block["text"] = block.get("text", "") + delta.get("text", "")
                block["json"] += delta.get("partial_json", "")
    return [
        {"type": "tool_use", "id": block["id"], "name": block["name"], "input": json.loads(block["json"] or "{}")}
        if block["type"] == "tool_use"
        else {"type": "text", "text": block["text"]}
        for block in blocks
    ]
