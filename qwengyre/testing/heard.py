"""What a client of each dialect makes of an answer, and the next request that it sends: the answer, and after it results or a word of the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Follow = Callable[[dict[str, Any]], dict[str, Any]]
"""A request's body to the next one's."""


def turn_heard(dialect: str, answer: bytes, *, is_stream: bool) -> Follow:
    """Read an answer as it came over the wire."""
    return {"chat": _chat, "messages": _messages, "responses": _responses, "gemini": _gemini}[dialect](answer, is_stream)


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The data of server-sent events."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


def _chat(answer: bytes, is_stream: bool) -> Follow:
    message = _chat_streamed(answer) if is_stream else json.loads(answer)["choices"][0]["message"]

    def follow(body: dict[str, Any]) -> dict[str, Any]:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in message.get("tool_calls") or ()]
        return {**body, "messages": [*body["messages"], message, *(results or [{"role": "user", "content": "go on"}])]}

    return follow


def _chat_streamed(answer: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for event in events(answer):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append(
                        {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}
                    )
                calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
    return {**message, **({"tool_calls": calls} if calls else {})}


def _messages(answer: bytes, is_stream: bool) -> Follow:
    content = _messages_streamed(answer) if is_stream else json.loads(answer)["content"]
    content = [block for block in content if block.get("text") != ""]  # clients may not send an empty text back

    def follow(body: dict[str, Any]) -> dict[str, Any]:
        uses = [block["id"] for block in content if block["type"] == "tool_use"]
        after = [{"type": "tool_result", "tool_use_id": use, "content": "r"} for use in uses] or "go on"
        return {
            **body,
            "messages": [*body["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": after}],
        }

    return follow


def _messages_streamed(answer: bytes) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events(answer):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                into = {"partial_json": "json", "text": "text", "thinking": "thinking", "signature": "signature"}.get(name)
                if into:
                    blocks[event["index"]][into] += value
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = _object(written)
    return blocks


def _object(written: str) -> Any:
    try:
        value = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return {"__unparsedToolInput": written}
    return value if isinstance(value, dict) else {"__unparsedToolInput": written}


def _gemini(answer: bytes, is_stream: bool) -> Follow:
    answers = list(events(answer)) if is_stream else [json.loads(answer)]
    parts = [part for said in answers for part in said["candidates"][0]["content"]["parts"]]

    def follow(body: dict[str, Any]) -> dict[str, Any]:
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        results: list[dict[str, Any]] = [
            {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": "r"}}} for call in calls
        ]
        said = {"role": "model", "parts": parts}, {"role": "user", "parts": results or [{"text": "go on"}]}
        return {**body, "contents": [*body["contents"], *said]}

    return follow


def _responses(answer: bytes, is_stream: bool) -> Follow:
    ended = list(events(answer))[-1]["response"] if is_stream else json.loads(answer)
    output = ended["output"]

    def follow(body: dict[str, Any]) -> dict[str, Any]:
        said = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls]
        return {**body, "input": [*said, *output, *(results or [{"role": "user", "content": "go on"}])]}

    return follow
