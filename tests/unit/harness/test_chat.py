"""The official client in front of an in-memory server: whole and streamed replies come out the same."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from qwengyre_harness.agent import ToolCall
from qwengyre_harness.chat import Chat
from qwengyre_harness.main import main, preload

CALLS = [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}]
USAGE = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
HEAD = {"id": "x", "created": 0, "model": "policy"}


def whole(message: dict) -> httpx.Response:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant"} | message}
    return httpx.Response(200, json=HEAD | {"object": "chat.completion", "choices": [choice], "usage": USAGE})


def streamed(*deltas: dict) -> httpx.Response:
    chunks = [HEAD | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append(HEAD | {"object": "chat.completion.chunk", "choices": [], "usage": USAGE})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})


def chat(*responses: httpx.Response, is_streamed: bool) -> tuple[Chat, list[dict]]:
    waiting, asked = list(responses), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return waiting.pop(0)

    client = openai.OpenAI(
        base_url="http://gateway/v1",
        api_key="key",
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
        max_retries=1,
    )
    return Chat(client, "policy", is_streamed), asked


def test_a_whole_reply():
    model, asked = chat(whole({"content": "thinking", "tool_calls": CALLS}), is_streamed=False)
    reply = model.complete([{"role": "user", "content": "hi"}], [])
    assert (reply.content, reply.num_tokens) == ("thinking", 42)
    assert reply.tool_calls == (ToolCall("c1", "run", '{"command": "ls"}'),)
    assert asked[0]["messages"] == [{"role": "user", "content": "hi"}] and "stream" not in asked[0]


def test_a_streamed_reply_in_fragments():
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"comm'}}
    rest = {"index": 0, "function": {"arguments": 'and": "ls"}'}}
    response = streamed(
        {"role": "assistant", "content": "think"}, {"content": "ing"}, {"tool_calls": [first]}, {"tool_calls": [rest]}
    )
    model, asked = chat(response, is_streamed=True)
    reply = model.complete([{"role": "user", "content": "hi"}], [])
    assert (reply.content, reply.num_tokens) == ("thinking", 42)
    assert reply.tool_calls == (ToolCall("c1", "run", '{"command": "ls"}'),)
    assert asked[0]["stream_options"] == {"include_usage": True}


def test_a_reply_goes_back_as_it_came():
    model, _ = chat(whole({"content": None, "tool_calls": CALLS}), is_streamed=False)
    assert model.complete([], []).message() == {"role": "assistant", "content": "", "tool_calls": CALLS}


def test_a_failed_request_is_tried_again_by_the_client():
    failed = httpx.Response(503, json={"error": {"message": "busy"}}, headers={"retry-after-ms": "1"})
    model, asked = chat(failed, whole({"content": "hello"}), is_streamed=False)
    assert model.complete([], []).content == "hello" and len(asked) == 2


def test_a_refused_request_is_an_error():
    model, _ = chat(httpx.Response(401, json={"error": {"message": "wrong key"}}), is_streamed=False)
    with pytest.raises(openai.AuthenticationError, match="wrong key"):
        model.complete([], [])


def test_an_unreachable_server_ends_the_program_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    preload()
    assert main(["--retries", "0", "do something"]) == 1
    assert "qwengyre_harness: Connection error" in capsys.readouterr().err
