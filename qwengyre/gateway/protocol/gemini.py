"""Gemini's generateContent: the way out. The way in is `gemini_request`. Model and streaming stand in the path, not in the body."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs

from qwengyre.gateway.protocol import gemini_request, sse
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
from qwengyre.gateway.protocol.dialect import AnswerHead, AnswerStream, Dialect, Place
from qwengyre.gateway.protocol.fields import Json
from qwengyre.gateway.protocol.request import ItemCache, ModelRequest, arguments_object
from qwengyre.trajectory.match import ToolUse

STATUSES: Final = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
"""Any other is an INVALID_ARGUMENT."""
REASONS: Final = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
_PATH: Final = re.compile(r"(?:models|tunedModels)/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)")


class GeminiDialect(Dialect):
    name = "gemini"
    path = "models/{model}:generateContent"
    count_path = "models/{model}:countTokens"
    version = "v1beta"
    has_blocks = False
    tool_id_prefix = "call_"
    fields = gemini_request.FIELDS
    parts: ClassVar = {
        "generationConfig": gemini_request.GENERATION,
        "contents": gemini_request.CONTENT,
        "parts": gemini_request.PARTS,
        "tools, by name": gemini_request.TOOLS,
    }

    def place(self, path: str, query: str) -> Place | None:
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        is_stream = found["method"] == "streamGenerateContent"
        wrong = "answers are streamed as server-sent events: add ?alt=sse to the URL"
        is_wrong = is_stream and parse_qs(query).get("alt") != ["sse"]
        is_count = found["method"] == "countTokens"
        return Place(self, is_count=is_count, model=found["model"], stream=is_stream, wrong=wrong if is_wrong else "")

    def parse(self, body: bytes, cache: ItemCache) -> ModelRequest:
        return gemini_request.parse(body, cache)

    def stream(self, request: ModelRequest, head: AnswerHead) -> AnswerStream:
        return _Stream(request, head)

    def whole(self, request: ModelRequest, head: AnswerHead, said: AnswerSoFar, ending: Ending) -> bytes:
        parts = [_part(block) for block in said.blocks()]
        return sse.encode(_response(request, head, parts or [{"text": ""}], ending))

    def count(self, num_tokens: int) -> bytes:
        return sse.encode({"totalTokens": num_tokens})

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return sse.encode(_error(status, message))

    def overflow(self, num_tokens: int, max_tokens: int) -> bytes:
        """The sentence of Gemini, and the one of Anthropic, which clients of many providers look for everywhere."""
        return self.error(
            400,
            f"The input token count ({num_tokens}) exceeds the maximum number of tokens allowed ({max_tokens}). "
            f"(prompt is too long: {num_tokens} tokens > {max_tokens} maximum)",
        )


def _error(status: int, message: str) -> Json:
    return {"error": {"code": status, "message": message, "status": STATUSES.get(status, "INVALID_ARGUMENT")}}


def _part(block: Block) -> Json:
    if block.use is not None:
        return _call(block.use)
    if block.kind == "reasoning":
        return {"text": block.text, "thought": True}
    return {"text": block.text}


def _call(use: ToolUse) -> Json:
    call = {"id": use.id, "name": use.name, "args": arguments_object(use.arguments)}
    return {"functionCall": call, "thoughtSignature": gemini_request.signature(use.id)}


def _response(request: ModelRequest, head: AnswerHead, parts: Sequence[Json], ending: Ending | None) -> Json:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if ending is not None:
        candidate["finishReason"] = REASONS[ending.reason]
    usage = _usage(ending.usage) if ending else _usage(Usage(prompt=head.prompt_tokens, completion=0, cached=0))
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": request.model, "responseId": head.id}


def _usage(counted: Usage) -> Json:
    """Gemini counts thoughts beside what is said, not as a part of it."""
    return {
        "promptTokenCount": counted.prompt,
        "cachedContentTokenCount": counted.cached,
        "candidatesTokenCount": counted.completion - counted.reasoning,
        "thoughtsTokenCount": counted.reasoning,
        "totalTokenCount": counted.prompt + counted.completion,
    }


class _Stream:
    """Calls leave whole: a client of Gemini does not read arguments piece by piece."""

    def __init__(self, request: ModelRequest, head: AnswerHead):
        self._request, self._head = request, head
        self._call: ToolStart | None = None
        self._arguments: list[str] = []

    def start(self) -> bytes:
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[Json] = []
        for delta in sse.merged(deltas):
            if isinstance(delta, ToolArguments):
                self._arguments.append(delta.text)
                continue
            parts += self._ended_call()
            match delta:
                case TextDelta():
                    parts.append({"text": delta.text})
                case ReasoningDelta():
                    parts.append({"text": delta.text, "thought": True})
                case ToolStart():
                    self._call = delta
        return self._chunk(parts) if parts else b""

    def keep_alive(self) -> bytes:
        return self._chunk([{"text": ""}])

    def end(self, ending: Ending) -> bytes:
        return self._chunk(self._ended_call() or [{"text": ""}], ending)

    def fail(self, message: str) -> bytes:
        return sse.data(_error(500, message))

    def _ended_call(self) -> list[Json]:
        if self._call is None:
            return []
        use = ToolUse(id=self._call.id, name=self._call.name, arguments="".join(self._arguments))
        self._call, self._arguments = None, []
        return [_call(use)]

    def _chunk(self, parts: Sequence[Json], ending: Ending | None = None) -> bytes:
        return sse.data(_response(self._request, self._head, parts, ending))
