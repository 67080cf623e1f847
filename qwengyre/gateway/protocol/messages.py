"""Anthropic Messages: the way out. The way in is `messages_request`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from qwengyre.gateway.protocol import messages_request, sse
from qwengyre.gateway.protocol.deltas import (
    AnswerSoFar,
    Block,
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
from qwengyre.gateway.protocol.request import ItemCache, ModelRequest, arguments_object

SIGNATURE: Final = "qwengyre"
"""Clients send thinking back only with a signature."""
STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesDialect(Dialect):
    name = "messages"
    path = "messages"
    count_path = "messages/count_tokens"
    has_blocks = True
    tool_id_prefix = "toolu_"
    fields = messages_request.FIELDS
    parts: ClassVar = {
        "messages": messages_request.MESSAGE,
        "content blocks": messages_request.BLOCKS,
        "parts of a tool result": messages_request.RESULT_PARTS,
        "tools, by type": messages_request.TOOLS,
    }

    def parse(self, body: bytes, cache: ItemCache) -> ModelRequest:
        return messages_request.parse(body, cache)

    def stream(self, request: ModelRequest, head: AnswerHead) -> AnswerStream:
        return _Stream(request, head)

    def whole(self, request: ModelRequest, head: AnswerHead, said: AnswerSoFar, ending: Ending) -> bytes:
        content = [_content(block) for block in said.blocks()]
        if all(block["type"] == "thinking" for block in content):
            content.append({"type": "text", "text": ""})
        return sse.encode(
            {
                "id": f"msg_{head.id}",
                "type": "message",
                "role": "assistant",
                "model": request.model,
                "content": content,
                "stop_reason": "stop_sequence" if ending.stop_string is not None else STOP_REASONS[ending.reason],
                "stop_sequence": ending.stop_string,
                "usage": _usage(ending.usage),
            }
        )

    def count(self, num_tokens: int) -> bytes:
        return sse.encode({"input_tokens": num_tokens})

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return sse.encode(_error(message, kind_of(status)))

    def overflow(self, num_tokens: int, max_tokens: int) -> bytes:
        return self.error(400, f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")


def _usage(counted: Usage) -> Json:
    return {
        "input_tokens": counted.prompt - counted.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.completion,
    }


class _Stream:
    """One content block is open at a time."""

    def __init__(self, request: ModelRequest, head: AnswerHead):
        self._message: Json = {
            "id": f"msg_{head.id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(prompt=head.prompt_tokens, completion=0, cached=0)),
        }
        self._open: str | None = None
        self._index = -1
        self._has_said = False
        """Something but thoughts."""

    def start(self) -> bytes:
        return sse.event("message_start", {"type": "message_start", "message": self._message})

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._delta(delta) for delta in sse.merged(deltas))

    def keep_alive(self) -> bytes:
        return sse.event("ping", {"type": "ping"})

    def end(self, ending: Ending) -> bytes:
        out = b"" if self._has_said else self._begin("text", {"type": "text", "text": ""})
        out += self._close()
        reason = "stop_sequence" if ending.stop_string is not None else STOP_REASONS[ending.reason]
        delta = {"stop_reason": reason, "stop_sequence": ending.stop_string}
        out += sse.event("message_delta", {"type": "message_delta", "delta": delta, "usage": _usage(ending.usage)})
        return out + sse.event("message_stop", {"type": "message_stop"})

    def fail(self, message: str) -> bytes:
        return self._close() + sse.event("error", _error(message, "api_error"))

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                out = self._begin("text", {"type": "text", "text": ""})
                return out + self._say({"type": "text_delta", "text": delta.text})
            case ReasoningDelta():
                out = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return out + self._say({"type": "thinking_delta", "thinking": delta.text})
            case ToolStart():
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                return self._close() + self._begin("tool_use", block)
            case ToolArguments():
                return self._say({"type": "input_json_delta", "partial_json": delta.text})

    def _begin(self, kind: str, block: Json) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._has_said |= kind != "thinking"
        self._open, self._index = kind, self._index + 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return out + sse.event("content_block_start", start)

    def _say(self, delta: Json) -> bytes:
        return sse.event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = self._say({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return out + sse.event("content_block_stop", {"type": "content_block_stop", "index": self._index})


def _content(block: Block) -> Json:
    if block.use is not None:
        return {"type": "tool_use", "id": block.use.id, "name": block.use.name, "input": arguments_object(block.use.arguments)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    return {"type": "text", "text": block.text}


def _error(message: str, kind: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}}
