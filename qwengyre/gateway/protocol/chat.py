"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from qwengyre.gateway.protocol import sse
from qwengyre.gateway.protocol.deltas import Delta, Ending, ReasoningDelta, TextDelta, ToolArguments, ToolStart, Usage
from qwengyre.gateway.protocol.request import (
    InvalidRequest,
    ItemCache,
    ModelRequest,
    ParsedItem,
    Tools,
    decode,
    first_user_text,
    function_spec,
    join_texts,
    last_user_block,
    stop_strings,
    system_texts,
    tools_of,
)
from qwengyre.trajectory.match import ToolUse, Turn, TurnRole

ROLES: Final[dict[str, TurnRole]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    functions: msgspec.Raw = msgspec.Raw(b"null")


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Tool(msgspec.Struct):
    function: _Function | None = None
    type: str = "function"


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = decode(body, _Body, "request body")
    if not asked.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if asked.n not in (None, 1):
        raise InvalidRequest("n must be 1: ask once for every answer that you want", param="n")
    if bytes(asked.functions) not in (b"null", b"[]"):
        raise InvalidRequest("functions are not served: send them as tools", param="functions")
    items = [cache.get("chat message", raw, lambda raw: _parse_message(raw, cache)) for raw in asked.messages]
    turns = tuple(keyed for item in items for keyed in item.turns)
    tools = cache.get("chat tools", asked.tools, _parse_tools)
    system_text, system_digest = system_texts(turns)
    return ModelRequest(
        dialect="chat",
        turns=turns,
        tools=tools,
        model=asked.model,
        stream=bool(asked.stream),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        stops=stop_strings(asked.stop),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        system_text=system_text,
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def _parse_message(raw: bytes, cache: ItemCache) -> ParsedItem:
    message = decode(raw, _Message, "messages")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"messages: unknown role {message.role!r}", param="messages")
    texts = _texts(message.content)
    uses = tuple(
        ToolUse(id=call.id, name=call.function.name, arguments=_arguments_text(call.function.arguments))
        for call in message.tool_calls or ()
    )
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    turn = Turn(
        role=role,
        text=join_texts(texts),
        reasoning=reasoning if role == "assistant" else None,
        tool_uses=tuple(cache.issued.get(use.id, use) for use in uses),
        tool_use_id=message.tool_call_id or "",
        name=(message.name or _issued_name(cache, message.tool_call_id)) if role == "tool" else "",
    )
    return ParsedItem(turns=(cache.keyed(turn),), last_block=texts[-1] if texts else "")


def _issued_name(cache: ItemCache, tool_use_id: str | None) -> str:
    issued = cache.issued.get(tool_use_id or "")
    return issued.name if issued else ""


def _texts(content: str | list[_Part] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content or ():
        text = part.text if part.text is not None else part.refusal
        if text is None:
            raise InvalidRequest(f"this model reads text only, not {part.type!r} content", param="messages")
        texts.append(text)
    return texts


def _arguments_text(arguments: str | dict | None) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return msgspec.json.encode(arguments or {}).decode()


def _parse_tools(raw: bytes) -> Tools:
    tools = decode(raw, list[_Tool] | None, "tools") or []
    functions = [tool.function for tool in tools if tool.function is not None]
    return tools_of([function_spec(function.name, function.description, function.parameters) for function in functions])


def usage(counted: Usage) -> dict:
    return {
        "prompt_tokens": counted.prompt,
        "completion_tokens": counted.completion,
        "total_tokens": counted.prompt + counted.completion,
        "prompt_tokens_details": {"cached_tokens": counted.cached},
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning},
    }


class Stream:
    """Deltas to server-sent events."""

    def __init__(self, request: ModelRequest, answer_id: str, *, created: int, prompt_tokens: int):
        self._include_usage = request.include_usage
        self._head = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._chunk(_delta(delta)) for delta in sse.merged(deltas))

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: Qwen Code counts data only, not comments."""
        return self._chunk({"content": ""})

    def end(self, ending: Ending) -> bytes:
        last = self._chunk({}, ending.reason)
        if self._include_usage:
            last += sse.data({**self._head, "choices": [], "usage": usage(ending.usage)})
        return last + sse.DONE

    def fail(self, message: str) -> bytes:
        return sse.data(error(message, kind="server_error")) + sse.DONE

    def _chunk(self, delta: dict, reason: str | None = None) -> bytes:
        return sse.data({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def _delta(delta: Delta) -> dict:
    match delta:
        case TextDelta():
            return {"content": delta.text}
        case ReasoningDelta():
            return {"reasoning_content": delta.text}
        case ToolStart():
            function = {"name": delta.name, "arguments": ""}
            return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
        case ToolArguments():
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def body(request: ModelRequest, answer_id: str, turn: Turn, ending: Ending, *, created: int) -> bytes:
    """The whole answer, not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text if turn.text or not turn.tool_uses else None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_uses:
        message["tool_calls"] = [
            {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}
            for use in turn.tool_uses
        ]
    return sse.encode(
        {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion",
            "created": created,
            "model": request.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": ending.reason}],
            "usage": usage(ending.usage),
        }
    )


def error(message: str, *, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
