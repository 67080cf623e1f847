"""Nothing that a client asks for is dropped in silence: it is honored, ignored by name, or refused with what to do."""

from __future__ import annotations

import gzip
import json
import typing
from pathlib import Path

import openai
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param

from qwengyre.gateway.dialects import BY_NAME, DIALECTS
from qwengyre.gateway.protocol.fields import Honored, Ignored, RefusedField
from qwengyre.testing.asgi_client import begin

PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": {}}}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}],
    "messages": [{"name": "run", "input_schema": SCHEMA}],
    "responses": [{"type": "function", "name": "run", "parameters": SCHEMA}],
}
NO_CALLS = {"chat": "none", "messages": {"type": "none"}, "responses": "none"}
ONE_CALL = {
    "chat": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "responses": {"parallel_tool_calls": False},
}
FORCED = {
    "chat": ["required", {"type": "function", "function": {"name": "run"}}],
    "messages": [{"type": "any"}, {"type": "tool", "name": "run"}],
    "responses": ["required", {"type": "function", "name": "run"}],
}
LIMIT = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
NAMES = ["chat", "messages", "responses"]
"""Gemini says in its path and below other names what these say in the body: tests/unit/gateway/test_gemini.py."""


def body(name: str, said: str | list = "hi", /, **more) -> dict:
    if name == "gemini":
        parts = [{"text": said}] if isinstance(said, str) else said
        return {"contents": [{"role": "user", "parts": parts}], **more}
    key = "input" if name == "responses" else "messages"
    return {key: [{"role": "user", "content": said}], **more}


async def post(bench, execution, name: str, body: dict | bytes, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = f"/v1/{BY_NAME[name].path.format(model='policy')}"
    return await begin(bench.harness_app, "POST", path, headers={"x-api-key": execution.keys.key, **headers}, body=data).finish()


async def ask(bench, name: str, body: dict | bytes, said: str = "ok<|im_end|>", **headers):
    async with bench.running():
        return await post(bench, await bench.open(engine=bench.says(said)), name, body, **headers)


def answer(name: str, exchange) -> tuple[str, list[str]]:
    """Text and names of calls."""
    got = json.loads(exchange.body)
    if name == "chat":
        message = got["choices"][0]["message"]
        return message["content"] or "", [call["function"]["name"] for call in message.get("tool_calls", ())]
    if name == "messages":
        text = "".join(block["text"] for block in got["content"] if block["type"] == "text")
        return text, [block["name"] for block in got["content"] if block["type"] == "tool_use"]
    text = "".join(part["text"] for item in got["output"] if item["type"] == "message" for part in item["content"])
    return text, [item["name"] for item in got["output"] if item["type"] == "function_call"]


# --- the table -----------------------------------------------------------------------------------------------------------


def told(field: Honored | Ignored | RefusedField) -> str:
    match field:
        case Honored():
            return f"honored: {field.note}" if field.note else "honored"
        case Ignored():
            return f"ignored: {field.because}"
        case RefusedField():
            unless = " or ".join(f"`{json.dumps(value)}`" for value in field.unless)
            return f"refused{f' unless {unless}' if unless else ''}: {field.do}"


def printed(dialect) -> str:
    lines = [f"### `/{dialect.version}/{dialect.path}`"]
    for place, fields in {"body": dialect.fields, **dialect.parts}.items():
        lines += [f"| {place} | |", "| --- | --- |", *(f"| `{name}` | {told(field)} |" for name, field in fields.items()), ""]
    return "\n".join(lines)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_page_prints_the_table_of_the_code(dialect):
    assert printed(dialect) in PAGE, f"docs/gateway.md should say:\n{printed(dialect)}"


def fields_of(typed_dict: type) -> set[str]:
    return set(typing.get_type_hints(typed_dict))


def test_the_tables_hold_every_published_field_of_openai():
    assert fields_of(chat_params.CompletionCreateParamsBase) <= set(BY_NAME["chat"].fields)
    assert fields_of(response_create_params.ResponseCreateParamsBase) <= set(BY_NAME["responses"].fields)


def test_the_table_holds_every_published_input_item_of_openai():
    kinds: set[str] = set()
    for item in typing.get_args(response_input_item_param.ResponseInputItemParam):
        todo = [typing.get_type_hints(item).get("type")]
        while todo:
            hint = todo.pop()
            kinds |= {hint} if isinstance(hint, str) else set()
            todo += typing.get_args(hint)
    assert {"message", "reasoning", "item_reference"} <= kinds <= set(BY_NAME["responses"].parts["input items"])


# --- refused, ignored ----------------------------------------------------------------------------------------------------


def refused_fields():
    return [
        (dialect.name, name, field)
        for dialect in DIALECTS
        for name, field in dialect.fields.items()
        if isinstance(field, RefusedField)
    ]


def nested(name: str, value: object) -> dict:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value}} if inner else {outer: value}


@pytest.mark.parametrize(
    ("dialect", "name", "field"), refused_fields(), ids=lambda value: value if isinstance(value, str) else ""
)
async def test_refused_fields_are_refused_with_what_to_do(bench, dialect, name, field):
    value = {"type": "json_schema", "schema": {}} if "format" in name else [{"type": "x", "name": "f"}]
    got = await ask(bench, dialect, body(dialect, **nested(name, value)))
    assert got.status == 400
    assert field.do in json.loads(got.body)["error"]["message"] and name in json.loads(got.body)["error"]["message"]


@pytest.mark.parametrize(
    ("dialect", "name", "field"), refused_fields(), ids=lambda value: value if isinstance(value, str) else ""
)
async def test_values_that_ask_for_nothing_are_accepted(bench, dialect, name, field):
    async with bench.running():
        values = [None, *field.unless]
        execution = await bench.open(engine=bench.says(*["ok<|im_end|>"] * len(values)))
        for value in values:
            got = await post(bench, execution, dialect, body(dialect, f"{value}", **nested(name, value)))
            assert got.status == 200, (value, got.body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_ignored_fields_are_named_in_a_header_unknown_ones_too(bench, name, stream):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        more = {"temperature": 0.2, "top_p": None, "x_new": 1, "bad\r\nname": 2, "stream": stream}
        async with bench.http(execution) as http:
            got = await http.post(f"/{BY_NAME[name].path}", json=body(name, **more))
            assert got.status_code == 200 and got.headers["x-qwengyre-ignored"] == "temperature, x_new"


async def test_a_request_without_ignored_fields_has_no_such_header(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        async with bench.http(execution) as http:
            got = await http.post("/chat/completions", json=body("chat", model="m", max_tokens=5))
            assert "x-qwengyre-ignored" not in got.headers


def in_a_message(name: str, place: str, kind: str) -> dict:
    """A request with a part of this kind in it."""
    match name, place:
        case "chat", "messages":
            return {"messages": [{"role": "assistant", kind: {"id": "x"}}]}
        case "messages", "parts of a tool result":
            content = [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": kind}]}]
            return {"messages": [{"role": "user", "content": content}]}
        case "responses", "input items":
            return {"input": [{"type": kind}]}
        case "gemini", "generationConfig":
            return body("gemini", generationConfig={kind: {"x": 1}})
        case "gemini", "parts":
            return body("gemini", [{kind: {"x": 1}}])
    if place.startswith("tools"):
        return body(name, tools=[{"type": kind, kind: {"name": "x"}}])
    return body(name, [{"type": kind}])


def refused_parts():
    return [
        (dialect.name, place, kind, field)
        for dialect in DIALECTS
        for place, table in dialect.parts.items()
        for kind, field in table.items()
        if isinstance(field, RefusedField)
    ]


@pytest.mark.parametrize(
    ("name", "place", "kind", "field"), refused_parts(), ids=lambda value: value if isinstance(value, str) else ""
)
async def test_refused_parts_are_refused_with_what_to_do(bench, name, place, kind, field):
    got = await ask(bench, name, in_a_message(name, place, kind))
    assert got.status == 400
    assert field.do in json.loads(got.body)["error"]["message"] and kind in json.loads(got.body)["error"]["message"]


# --- tool choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_without_calls_wanted_a_call_is_text_and_the_next_turn_goes_on(bench, name, stream):
    async with bench.running():
        said = f"Look.\n{CALL.format('run', 1)}\n{CALL.format('run', 2)}<|im_end|>"
        execution = await bench.open(engine=bench.says(said, "done<|im_end|>"))
        asked = body(name, tools=TOOLS[name], tool_choice=NO_CALLS[name])
        got = await post(bench, execution, name, {**asked, "stream": stream})
        if not stream:
            text, calls = answer(name, got)
            assert (text, calls) == (f"Look.\n{CALL.format('run', 1)}\n{CALL.format('run', 2)}", [])
        assert not any(sign in got.body for sign in (b'"tool_use"', b'"function_call"', b'"tool_calls"'))
        text = f"Look.\n{CALL.format('run', 1)}\n{CALL.format('run', 2)}"
        key = "input" if name == "responses" else "messages"
        asked[key] += [{"role": "assistant", "content": text}, {"role": "user", "content": "no"}]
        await post(bench, execution, name, asked)
        calls = await bench.gateway.close(execution.id)
        assert [call.started.cause for call in calls][1] in ("extends", "rerendered")
        assert calls[1].started.base == 0


@pytest.mark.parametrize("tokens_per_chunk", [1, 500])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_with_one_call_wanted_the_next_context_ends_after_the_first(bench, name, stream, tokens_per_chunk):
    async with bench.running():
        first, second = CALL.format("run", 1), CALL.format("run", 2)
        said = f"{first}\n{second}<|im_end|>"
        execution = await bench.open(engine=bench.says(said, "done<|im_end|>", tokens_per_chunk=tokens_per_chunk))
        got = await post(bench, execution, name, body(name, tools=TOOLS[name], stream=stream, **ONE_CALL[name]))
        assert b'"a\\": 2' not in got.body and b'"a":2' not in got.body and got.status == 200
        if not stream:
            assert answer(name, got) == ("", ["run"])
        calls = await bench.gateway.close(execution.id)
        ended = calls[0].finished
        assert ended.num_seen == len(bench.ids(first)) and ended.num_masked == ended.num_sampled - ended.num_seen
        assert ended.reason == "stop"


async def test_the_context_after_one_of_two_calls_extends_the_first(bench):
    async with bench.running():
        first, second = CALL.format("run", 1), CALL.format("run", 2)
        execution = await bench.open(engine=bench.says(f"{first}\n{second}<|im_end|>", "done<|im_end|>", tokens_per_chunk=500))
        asked = body("chat", tools=TOOLS["chat"], parallel_tool_calls=False)
        message = json.loads((await post(bench, execution, "chat", asked)).body)["choices"][0]["message"]
        asked["messages"] += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}]
        await post(bench, execution, "chat", asked)
        calls = await bench.gateway.close(execution.id)
        prompt = bench.text(calls.sequence(1, calls[1].num_prompt).tolist())
        assert calls[1].started.cause == "extends" and f"{first}<|im_end|>" in prompt and second not in prompt


@pytest.mark.parametrize(("name", "choice"), [(name, choice) for name in NAMES for choice in FORCED[name]], ids=str)
async def test_a_forced_call_is_ignored_by_name(bench, name, choice):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        async with bench.http(execution) as http:
            asked = body(name, tools=TOOLS[name], tool_choice=choice)
            got = await http.post(f"/{BY_NAME[name].path}", json=asked)
            assert got.status_code == 200 and got.headers["x-qwengyre-ignored"] == "tool_choice"


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("chat", "sometimes"),
        ("chat", {"type": "function", "function": {"name": "no"}}),
        ("chat", {"type": "allowed_tools", "allowed_tools": {}}),
        ("messages", {"type": "tool", "name": "no"}),
        ("messages", {"type": "sometimes"}),
        ("messages", "auto"),
        ("responses", "sometimes"),
        ("responses", {"type": "function", "name": "no"}),
        ("responses", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("responses", {"type": "web_search"}),
    ],
    ids=str,
)
async def test_choices_that_cannot_be_had_are_refused(bench, name, choice):
    got = await ask(bench, name, body(name, tools=TOOLS[name], tool_choice=choice))
    assert got.status == 400 and "tool_choice" in json.loads(got.body)["error"]["message"]


# --- numbers, tools, paths, headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, 0.5, -1e300, "7", True, [1]])
async def test_limits_that_are_no_whole_number_from_one_on_are_refused(bench, name, value):
    got = await ask(bench, name, body(name, **{LIMIT[name]: value}))
    assert got.status == 400 and LIMIT[name] in json.loads(got.body)["error"]["message"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_whole_float_is_a_limit(bench, name):
    got = await ask(bench, name, body(name, **{LIMIT[name]: 3.0}), "abcdef<|im_end|>")
    assert got.status == 200 and answer(name, got)[0] == "abc"


async def test_tools_of_one_name_in_two_namespaces_have_two_names_for_the_policy(bench):
    async with bench.running():
        said = [CALL.format("mcp__b__search", 1) + "<|im_end|>", "done<|im_end|>"]
        engine = bench.says(*said)
        execution = await bench.open(engine=engine)
        tool = {"type": "function", "name": "search", "parameters": SCHEMA}
        only = {"type": "function", "name": "only", "parameters": SCHEMA}
        namespaces = [{"type": "namespace", "name": f"mcp__{name}", "tools": [tool]} for name in "ab"]
        namespaces[0]["tools"] = [tool, only]
        asked = {"input": [{"role": "user", "content": "x"}], "tools": namespaces}
        got = json.loads((await post(bench, execution, "responses", asked)).body)["output"][0]
        assert (got["name"], got["namespace"]) == ("search", "mcp__b")
        prompt = bench.text(list(memoryview(engine.requests[0].token_ids).cast("i")))
        assert [prompt.count(f'"name": "{name}"') for name in ("mcp__a__search", "mcp__b__search", "only", "search")] == [
            1,
            1,
            1,
            0,
        ]
        foreign = {"type": "function_call", "call_id": "f", "name": "search", "namespace": "mcp__a", "arguments": "{}"}
        outputs = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in (got["call_id"], "f")]
        asked["input"] += [got, outputs[0], foreign, outputs[1]]
        assert (await post(bench, execution, "responses", asked)).status == 200
        calls = await bench.gateway.close(execution.id)
        prompt = bench.text(calls.sequence(1, calls[1].num_prompt).tolist())
        assert said[0] in prompt and '{"name": "mcp__a__search", "arguments": {}}' in prompt


@pytest.mark.parametrize("name", NAMES)
async def test_two_different_tools_of_one_name_are_refused(bench, name):
    other = json.loads(json.dumps(TOOLS[name][0]).replace("integer", "string"))
    got = await ask(bench, name, body(name, tools=[*TOOLS[name], other]))
    assert got.status == 400 and "two are called 'run'" in json.loads(got.body)["error"]["message"]


@pytest.mark.parametrize("name", NAMES)
async def test_the_same_tool_twice_is_one_tool(bench, name):
    async with bench.running():
        engine = bench.says("ok<|im_end|>")
        execution = await bench.open(engine=engine)
        assert (await post(bench, execution, name, body(name, tools=TOOLS[name] * 2))).status == 200
        assert bench.text(list(memoryview(engine.requests[0].token_ids).cast("i"))).count('"name": "run"') == 1


SERVER_TOOLS = {
    "messages": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, {"type": "bash_20250124", "name": "bash"}],
    "responses": [{"type": "web_search"}, {"type": "local_shell"}],
}


@pytest.mark.parametrize("name", SERVER_TOOLS)
async def test_tools_of_the_provider_are_not_offered_to_the_policy(bench, name):
    async with bench.running():
        engine = bench.says("ok<|im_end|>")
        execution = await bench.open(engine=engine)
        async with bench.http(execution) as http:
            got = await http.post(f"/{BY_NAME[name].path}", json=body(name, tools=SERVER_TOOLS[name]))
        named = ", ".join(sorted(f"tools.{tool['type']}" for tool in SERVER_TOOLS[name]))
        assert got.status_code == 200 and got.headers["x-qwengyre-ignored"] == named
        prompt = bench.text(list(memoryview(engine.requests[0].token_ids).cast("i")))
        assert "web_search" not in prompt and "shell" not in prompt and "bash" not in prompt


async def test_custom_tools_of_chat_are_refused_with_what_to_do(bench):
    got = await ask(bench, "chat", body("chat", tools=[{"type": "custom", "custom": {"name": "edit"}}]))
    assert got.status == 400 and "function with one string argument" in json.loads(got.body)["error"]["message"]


async def test_a_model_can_be_retrieved_under_any_name(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says())
        http = bench.http()
        ai = openai.AsyncOpenAI(api_key=execution.keys.key, base_url="http://gateway/v1", http_client=http, max_retries=0)
        assert [model.id async for model in ai.models.list()] == ["policy"]
        assert [(await ai.models.retrieve(name)).id for name in ("policy", "org/other")] == ["policy", "org/other"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER ", ""])
async def test_the_scheme_of_a_key_is_read_as_http_says(bench, scheme):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        headers = {"authorization": f"{scheme} {execution.keys.key}".strip()}
        data = json.dumps(body("chat")).encode()
        got = await begin(bench.harness_app, "POST", "/v1/chat/completions", headers=headers, body=data).finish()
        assert got.status == 200


async def test_a_body_of_several_gzip_members_is_whole(bench):
    data = json.dumps(body("chat")).encode()
    packed = b"".join(gzip.compress(data[at : at + 20]) for at in range(0, len(data), 20))

    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        for sent, status in ((packed, 200), (packed[:-9], 400), (gzip.compress(b"") * 100, 400)):
            got = await post(bench, execution, "chat", sent, **{"content-encoding": "gzip"})
            assert got.status == status


async def test_a_thinking_part_of_an_assistant_is_its_reasoning(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("<think>\nso\n</think>\n\nHello!<|im_end|>", "x<|im_end|>"))
        asked = body("chat")
        await post(bench, execution, "chat", asked)
        parts = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Hello!"}]
        asked["messages"] += [{"role": "assistant", "content": parts}, {"role": "user", "content": "b"}]
        assert (await post(bench, execution, "chat", asked)).status == 200
        calls = await bench.gateway.close(execution.id)
        assert calls[1].started.base == 0


@pytest.mark.parametrize("arguments", ["null", "", " ", None])
async def test_a_call_without_arguments_has_an_empty_object(bench, arguments):
    async with bench.running():
        engine = bench.says("x<|im_end|>")
        execution = await bench.open(engine=engine)
        call = {"id": "a", "type": "function", "function": {"name": "run", "arguments": arguments}}
        asked = body("chat", tools=TOOLS["chat"])
        asked["messages"] += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "r"},
        ]
        assert (await post(bench, execution, "chat", asked)).status == 200
        assert '"arguments": {}' in bench.text(list(memoryview(engine.requests[0].token_ids).cast("i")))


@pytest.mark.parametrize("name", ["chat", "responses"])
async def test_usage_says_how_many_tokens_were_reasoning(bench, name):
    thought = "<think>\nso be it\n"
    got = json.loads((await ask(bench, name, body(name), f"{thought}</think>\n\nHello!<|im_end|>")).body)["usage"]
    details = got.get("completion_tokens_details") or got["output_tokens_details"]
    assert len(bench.ids("<think>")) < details["reasoning_tokens"] <= len(bench.ids(thought))


@pytest.mark.parametrize("path", ["messages/count_tokens", "responses/input_tokens"])
async def test_a_prompt_can_be_counted(bench, path):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        async with bench.http(execution) as http:
            asked = body(path.partition("/")[0])
            counted = (await http.post(f"/{path}", json=asked)).json()["input_tokens"]
            assert (
                counted
                == execution.session._rendering.render(
                    [
                        keyed.turn
                        for keyed in BY_NAME["chat"].parse(json.dumps(body("chat")).encode(), execution.session.items).turns
                    ],
                    (),
                ).size
            )
