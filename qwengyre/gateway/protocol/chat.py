"""OpenAI Chat Completions: the way out. The way in is `chat_request`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from qwengyre.gateway.protocol import chat_request, sse
from qwengyre.gateway.protocol.deltas import (
    AnswerSoFar,
    Delta,
    Ending,
    ReasoningDelta,
    TextDelta,
    ToolArguments,
    ToolStart,
    Usage,
)
from qwengyre.gateway.protocol.dialect import AnswerHead, AnswerStream, Dialect, kind_of
from qwengyre.gateway.protocol.fields import Json
from qwengyre.gateway.protocol.openai_errors import openai_error, openai_overflow
from qwengyre.gateway.protocol.request import ItemCache, ModelRequest


class ChatDialect(Dialect):
    name = "chat"
    path = "chat/completions"
    count_path = ""
    has_blocks = False
    tool_id_prefix = "call_"
    fields = chat_request.FIELDS
    parts: ClassVar = {
        "messages": chat_request.MESSAGE,
        "content parts": chat_request.PARTS,
        "tools, by type": chat_request.TOOLS,
    }

    def parse(self, body: bytes, cache: ItemCache) -> ModelRequest:
        return chat_request.parse(body, cache)

    def stream(self, request: ModelRequest, head: AnswerHead) -> AnswerStream:
        return _Stream(request, head)

    def whole(self, request: ModelRequest, head: AnswerHead, said: AnswerSoFar, ending: Ending) -> bytes:
        turn = said.turn()
        message: dict[str, Any] = {"role": "assistant", "content": turn.text if turn.text or not turn.tool_uses else None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_uses:
            message["tool_calls"] = chat_request.tool_calls(turn.tool_uses)
        return sse.encode(
            {
                "id": f"chatcmpl-{head.id}",
                "object": "chat.completion",
                "created": head.created,
                "model": request.model,
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": ending.reason}],
                "usage": _usage(ending.usage),
            }
        )

    def count(self, num_tokens: int) -> bytes:
        raise NotImplementedError("this dialect has no request that counts")

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return sse.encode(openai_error(message, kind=kind_of(status), code=code, param=param))

    def overflow(self, num_tokens: int, max_tokens: int) -> bytes:
        return openai_overflow(num_tokens, max_tokens, param="messages")


def _usage(counted: Usage) -> Json:
    return {
        "prompt_tokens": counted.prompt,
        "completion_tokens": counted.completion,
        "total_tokens": counted.prompt + counted.completion,
        "prompt_tokens_details": {"cached_tokens": counted.cached},
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning},
    }


class _Stream:
    def __init__(self, request: ModelRequest, head: AnswerHead):
        self._include_usage = request.include_usage
        self._head = {
            "id": f"chatcmpl-{head.id}",
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": request.model,
        }
        self._before_delta = b"data: " + sse.encode(self._head)[:-1] + b',"choices":[{"index":0,"delta":'
        """Of every event but the last; most of its bytes, so it is encoded once."""

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._chunk(_delta(delta)) for delta in sse.merged(deltas)])

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: Qwen Code counts data only, not comments."""
        return self._chunk({"content": ""})

    def end(self, ending: Ending) -> bytes:
        last = self._chunk({}, ending.reason)
        if self._include_usage:
            last += sse.data({**self._head, "choices": [], "usage": _usage(ending.usage)})
        return last + sse.DONE

    def fail(self, message: str) -> bytes:
        return sse.data(openai_error(message, kind="server_error")) + sse.DONE

    def _chunk(self, delta: Json, reason: str | None = None) -> bytes:
        return self._before_delta + sse.encode(delta) + b',"finish_reason":' + sse.encode(reason) + b"}]}\n\n"


def _delta(delta: Delta) -> Json:
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
