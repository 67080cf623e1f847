"""Gemini's dialect is held to what the others are: nothing is dropped in silence, answers are recognized, errors are in its own form."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from qwengyre.core.errors import EngineUnavailable
from qwengyre.gateway.protocol.gemini_request import signature
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.heard import events

WHOLE, STREAM, COUNT = "generateContent", "streamGenerateContent?alt=sse", "countTokens"
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}, "type": {"type": "STRING"}}}
TOOLS = [{"functionDeclarations": [{"name": "run", "description": "Runs it.", "parameters": SCHEMA}]}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"a":  1 }}\n</tool_call>'
SAID = f"<think>\nso\n</think>\n\nLook.\n{CALL}<|im_end|>"
USER = {"role": "user", "parts": [{"text": "hi"}]}


async def post(bench, execution, method: str, body: dict, model: str = "policy", **headers):
    headers = headers or {"x-goog-api-key": execution.keys.key}
    path = f"/v1beta/models/{model}:{method}"
    return await begin(bench.harness_app, "POST", path, headers=headers, body=json.dumps(body).encode()).finish()


async def ask(bench, body: dict, said: str = "ok<|im_end|>", method: str = WHOLE):
    """One request; the exchange, and the prompt that the policy saw."""
    async with bench.running():
        engine = bench.says(said)
        got = await post(bench, await bench.open(engine=engine), method, body)
        prompts = [bench.text(list(memoryview(request.token_ids).cast("i"))) for request in engine.requests]
        return got, prompts[0] if prompts else ""


def parts_of(exchange, method: str) -> list[dict]:
    answers = list(events(exchange.body)) if method == STREAM else [json.loads(exchange.body)]
    return [part for answer in answers for part in answer["candidates"][0]["content"]["parts"]]


def joined(parts: list[dict], *, thought: bool) -> str:
    return "".join(part["text"] for part in parts if "text" in part and part.get("thought", False) is thought)


@pytest.mark.parametrize("method", [WHOLE, STREAM])
async def test_an_answer_has_thoughts_text_and_calls(bench, method):
    got, _ = await ask(bench, {"contents": [USER], "tools": TOOLS}, SAID, method)
    parts = parts_of(got, method)
    assert (joined(parts, thought=True), joined(parts, thought=False)) == ("so", "Look.")
    [part] = [part for part in parts if "functionCall" in part]
    call = part["functionCall"]
    assert (call["name"], call["args"]) == ("run", {"a": 1}) and part["thoughtSignature"] == signature(call["id"])
    last = list(events(got.body))[-1] if method == STREAM else json.loads(got.body)
    assert last["candidates"][0]["finishReason"] == "STOP" and last["modelVersion"] == "policy"
    usage = last["usageMetadata"]
    assert usage["promptTokenCount"] + usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == usage["totalTokenCount"]
    assert 0 < usage["thoughtsTokenCount"] <= len(bench.ids("<think>\nso\n"))
    assert usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == len(bench.ids(SAID))


KEPT = {
    "as it came": lambda part: part,
    "without ids": lambda part: (
        {**part, "functionCall": {**part["functionCall"], "id": None}} if "functionCall" in part else part
    ),
    "without signatures": lambda part: {name: value for name, value in part.items() if name != "thoughtSignature"},
    "without either": lambda part: (
        {"functionCall": {"name": part["functionCall"]["name"], "args": part["functionCall"]["args"]}}
        if "functionCall" in part
        else part
    ),
    "without thoughts": lambda part: None if part.get("thought") else part,
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("method", [WHOLE, STREAM])
async def test_the_next_turn_extends_the_answer_however_the_client_keeps_it(bench, method, kept):
    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID, "done<|im_end|>"))
        body = {"contents": [USER], "tools": TOOLS}
        parts = [KEPT[kept](part) for part in parts_of(await post(bench, execution, method, body), method)]
        parts = [part for part in parts if part is not None]
        result = {"functionResponse": {"name": "run", "response": {"output": "42"}}}
        body["contents"] = [USER, {"role": "model", "parts": parts}, {"role": "user", "parts": [result]}]
        assert (await post(bench, execution, method, body)).status == 200
        calls = await bench.gateway.close(execution.id)
        assert [call.started.cause for call in calls] == ["root", "extends"]
        assert CALL in bench.text(calls.sequence(1, calls[1].num_prompt).tolist())


async def test_text_after_a_call_is_recognized(bench):
    async with bench.running():
        said = f"Before.\n{CALL}\nAfter.\n{CALL}<|im_end|>"
        execution = await bench.open(engine=bench.says(said, "done<|im_end|>"))
        body = {"contents": [USER], "tools": TOOLS}
        content = json.loads((await post(bench, execution, WHOLE, body)).body)["candidates"][0]["content"]
        results = [{"functionResponse": {"id": "x", "name": "run", "response": {"output": "1"}}}] * 2
        body["contents"] = [USER, content, {"role": "user", "parts": results}]
        await post(bench, execution, WHOLE, body)
        assert (await bench.gateway.close(execution.id))[1].started.cause == "extends"


async def test_what_is_said_to_the_policy_reaches_it(bench):
    text_file = base64.b64encode("in a file \u00e9".encode()).decode()
    body = {
        "system_instruction": {"parts": [{"text": "be good"}, {"text": "be brief"}]},
        "contents": [
            {"parts": [{"text": "first"}, {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}}]},
            {"role": "model", "parts": [{"text": "mine"}, {"function_call": {"name": "run", "args": {"a": 7}}}]},
            {
                "role": "function",
                "parts": [
                    {"functionResponse": {"name": "run", "response": {"error": "it broke"}}},
                    {"functionResponse": {"name": "run", "response": {"x": [1]}}},
                    {"inline_data": {"mime_type": "text/plain", "data": text_file}},
                    {"fileData": {"mimeType": "application/pdf", "fileUri": "gs://a/b.pdf"}},
                ],
            },
        ],
        "tools": TOOLS,
    }
    got, prompt = await ask(bench, body)
    assert got.status == 200
    for said in ("be good\nbe brief", "first", "mine", '"a": 7', "it broke", '{"x":[1]}', "in a file \u00e9", "gs://a/b.pdf"):
        assert said in prompt, said
    assert "[image/png of 8 bytes left out" in prompt and "[application/pdf at gs://a/b.pdf left out" in prompt
    assert '"a": {"type": "integer"}' in prompt and '"type": {"type": "string"}' in prompt, "types as in a JSON schema"


async def test_ignored_fields_are_named_also_those_of_objects(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        body = {
            "contents": [USER],
            "safetySettings": [],
            "x_new": 1,
            "generation_config": {"temperature": 0.1, "top_p": 0.5, "thinkingConfig": {}, "maxOutputTokens": 50, "new": 1},
            "tools": [*TOOLS, {"googleSearch": {}}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["run"]}},
        }
        async with bench.http(execution) as http:
            got = await http.post("http://gateway/v1beta/models/m:generateContent", json=body)
        ignored = {"safetySettings", "xNew", "toolConfig", "tools.googleSearch"}
        ignored |= {f"generationConfig.{name}" for name in ("temperature", "topP", "thinkingConfig", "new")}
        assert got.status_code == 200 and set(got.headers["x-qwengyre-ignored"].split(", ")) == ignored


async def test_stop_sequences_and_limits_are_kept(bench):
    settings = {"stopSequences": ["END"], "maxOutputTokens": 100}
    got, _ = await ask(bench, {"contents": [USER], "generationConfig": settings}, "one END two<|im_end|>")
    assert joined(parts_of(got, WHOLE), thought=False).strip() == "one"
    got, _ = await ask_again(bench, {"contents": [USER], "generationConfig": {"maxOutputTokens": 3.0}}, "abcdef<|im_end|>")
    answer = json.loads(got.body)["candidates"][0]
    assert (answer["content"]["parts"][0]["text"], answer["finishReason"]) == ("abc", "MAX_TOKENS")


async def ask_again(bench, body, said):
    """In a gateway of its own: one that was stopped stays so."""
    fresh = type(bench)(bench.rendering, bench.folder.with_name("again"), bench.gateway.config)
    return await ask(fresh, body, said)


async def test_without_calls_wanted_a_call_is_text(bench):
    body = {"contents": [USER], "tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}
    got, _ = await ask(bench, body, f"Look.\n{CALL}<|im_end|>")
    assert "functionCall" not in got.body.decode() and "<tool_call>" in joined(parts_of(got, WHOLE), thought=False)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"contents": []}, "contents must not be empty"),
        ({"contents": [{"role": "bot", "parts": []}]}, "unknown role 'bot'"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, "executableCode"),
        ({"contents": [{"parts": [{}]}]}, "an empty part"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens must be a whole number from 1 on"),
        ({"generationConfig": {"responseMimeType": "application/json"}}, "the policy is not constrained"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"tools": [{"functionDeclarations": [{"description": "x"}]}]}, "a function without a name"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "unknown mode 'SOMETIMES'"),
        ({"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["no"]}}}, "toolConfig names 'no'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [WHOLE, STREAM])
async def test_refusals_are_in_its_own_form(bench, method, more, says):
    got, _ = await ask(bench, {"contents": [USER], **more}, method=method)
    error = json.loads(got.body)["error"]
    assert (got.status, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT") and says in error["message"], error


async def test_errors_of_the_gateway_are_in_its_own_form(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"), max_context_tokens=300)
        long = {"contents": [{"parts": [{"text": "w" * 3000}]}]}
        full = json.loads((await post(bench, execution, STREAM, long)).body)["error"]
        assert full["status"] == "INVALID_ARGUMENT" and "exceeds the maximum number of tokens allowed (300)" in full["message"]
        wrong = json.loads((await post(bench, execution, WHOLE, long, **{"x-goog-api-key": "no"})).body)["error"]
        assert (wrong["code"], wrong["status"]) == (401, "UNAUTHENTICATED")
        headers = {"x-goog-api-key": execution.keys.key}
        nowhere = await begin(bench.harness_app, "POST", "/v1beta/models/x:embed", headers=headers, body=b"{}").finish()
        assert nowhere.status == 200 or json.loads(nowhere.body)["error"]["status"] == "NOT_FOUND"
        array = await post(bench, execution, "streamGenerateContent", {"contents": [USER]})
        assert array.status == 400 and "add ?alt=sse" in json.loads(array.body)["error"]["message"]


@pytest.mark.parametrize("prefix", ["/v1beta", "/v1/v1beta", "/v1", "/v1alpha", ""])
async def test_any_version_and_a_key_in_the_address(bench, prefix):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        path = f"{prefix}/models/org/name:generateContent?key={execution.keys.key}"
        got = await begin(bench.harness_app, "POST", path, headers={}, body=json.dumps({"contents": [USER]}).encode()).finish()
        assert got.status == 200 and json.loads(got.body)["modelVersion"] == "org/name"


async def test_prompts_are_counted_and_models_listed(bench):
    async with bench.running():
        engine = bench.says("ok<|im_end|>")
        execution = await bench.open(engine=engine)
        body = {"contents": [USER], "tools": TOOLS}
        counts = [
            json.loads((await post(bench, execution, COUNT, asked)).body)["totalTokens"]
            for asked in (body, {"generateContentRequest": {"model": "models/policy", **body}})
        ]
        used = json.loads((await post(bench, execution, WHOLE, body)).body)["usageMetadata"]["promptTokenCount"]
        assert counts == [used, used]
        headers = {"x-goog-api-key": execution.keys.key}
        models = await begin(bench.harness_app, "GET", "/v1beta/models", headers=headers).finish()
        assert [model["name"] for model in json.loads(models.body)["models"]] == ["models/policy"]


async def test_an_answer_that_cannot_be_finished_ends_with_an_error(bench):
    class Broken(ScriptedEngine):
        async def generate(self, request):
            raise EngineUnavailable("gone")
            yield

    async with bench.running():
        execution = await bench.open(engine=Broken(max_context_tokens=100_000))
        exchange = begin(
            bench.harness_app,
            "POST",
            f"/v1beta/models/policy:{STREAM}",
            headers={"x-goog-api-key": execution.keys.key},
            body=json.dumps({"contents": [USER]}).encode(),
        )
        while not execution.live:
            await asyncio.sleep(0)
        await bench.gateway.close(execution.id)
        got = await exchange.finish()
        error = json.loads(got.body.removeprefix(b"data: "))["error"]
        assert error["status"] in ("UNAUTHENTICATED", "INTERNAL") and error["message"]
