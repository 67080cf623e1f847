"""OpenAI Responses: the way out. The way in is `responses_request`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec

from qwengyre.gateway.protocol import responses_request, sse
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
from qwengyre.gateway.protocol.openai_errors import openai_error, openai_overflow
from qwengyre.gateway.protocol.request import CallLimit, ItemCache, ModelRequest, Tools
from qwengyre.gateway.protocol.responses_request import ToolKind, item_id
from qwengyre.trajectory.match import ToolUse

FUNCTION = ToolKind()
UNSAID: Final[dict[str, Any]] = {
    "instructions": None,
    "metadata": {},
    "temperature": None,
    "top_p": None,
    "max_output_tokens": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "user": None,
}
"""Fields of an answer that say nothing here; some clients (litellm before 1.76) take no answer without them."""


class ResponsesDialect(Dialect):
    name = "responses"
    path = "responses"
    count_path = "responses/input_tokens"
    has_blocks = True
    tool_id_prefix = "call_"
    fields = responses_request.FIELDS
    parts: ClassVar = {
        "input items": responses_request.ITEMS,
        "content parts": responses_request.PARTS,
        "tools, by type": responses_request.TOOLS,
    }

    def parse(self, body: bytes, cache: ItemCache) -> ModelRequest:
        return responses_request.parse(body, cache)

    def stream(self, request: ModelRequest, head: AnswerHead) -> AnswerStream:
        return _Stream(request, head)

    def whole(self, request: ModelRequest, head: AnswerHead, said: AnswerSoFar, ending: Ending) -> bytes:
        blocks = said.blocks()
        output = [_item(block, head.id, index, request.tools) for index, block in enumerate(blocks)]
        if all(block.kind == "reasoning" for block in blocks):
            output.append(_message_item(item_id("msg", head.id, len(output)), "", "completed"))
        return sse.encode(_ended(_response(request, head), output, ending))

    def count(self, num_tokens: int) -> bytes:
        return sse.encode({"object": "response.input_tokens", "input_tokens": num_tokens})

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return sse.encode(openai_error(message, kind=kind_of(status), code=code, param=param))

    def overflow(self, num_tokens: int, max_tokens: int) -> bytes:
        return openai_overflow(num_tokens, max_tokens, param="input")


def _item(block: Block, answer: str, index: int, tools: Tools) -> Json:
    if block.use is not None:
        return _call_item(item_id("fc", answer, index), block.use, _kind(tools, block.use.name), "completed")
    if block.kind == "reasoning":
        return _reasoning_item(item_id("rs", answer, index), block.text)
    return _message_item(item_id("msg", answer, index), block.text, "completed")


class _CustomArguments(msgspec.Struct):
    input: str


def _usage(counted: Usage) -> Json:
    return {
        "input_tokens": counted.prompt,
        "input_tokens_details": {"cached_tokens": counted.cached},
        "output_tokens": counted.completion,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning},
        "total_tokens": counted.prompt + counted.completion,
    }


def _response(request: ModelRequest, head: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.calls is not CallLimit.ONE,
        "tool_choice": "none" if request.calls is CallLimit.NONE else "auto",
        "tools": [],
        "usage": None,
        **UNSAID,
    }


def _ended(response: Json, output: list[Json], ending: Ending) -> Json:
    is_cut = ending.reason == "length"
    return {
        **response,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": _usage(ending.usage),
    }


def _reasoning_item(item_id: str, text: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}


def _message_item(item_id: str, text: str | None, status: str) -> Json:
    content = [] if text is None else [_part(text)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(item_id: str, use: ToolUse, kind: ToolKind, status: str) -> Json:
    item = {"id": item_id, "type": kind.type, "status": status, "call_id": use.id, "name": kind.name or use.name}
    if kind.type == "custom_tool_call":
        item["input"] = _custom_input(use.arguments)
    else:
        item["arguments"] = use.arguments
    if kind.namespace is not None:
        item["namespace"] = kind.namespace
    return item


def _custom_input(arguments: str) -> str:
    """What a custom tool gets: its one text argument, or everything that the model wrote."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.MsgspecError, RecursionError):
        return arguments


class _Stream:
    """One output item is open at a time."""

    _use: ToolUse
    """The last tool call that was begun."""

    def __init__(self, request: ModelRequest, head: AnswerHead):
        self._response = _response(request, head)
        self._answer_id, self._tools = head.id, request.tools
        self._output: list[Json] = []
        self._open: str | None = None
        self._item_id = ""
        self._text: list[str] = []
        self._sequence = -1

    def start(self) -> bytes:
        return self._event("response.created", response=self._response) + self.keep_alive()

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._delta(delta) for delta in sse.merged(deltas))

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=self._response)

    def end(self, ending: Ending) -> bytes:
        if self._open in (None, "reasoning") and all(item["type"] == "reasoning" for item in self._output):
            out = self._begin_message() + self._close()  # as in an answer that is whole: a client keeps what it can send back
        else:
            out = self._close()
        whole = _ended(self._response, self._output, ending)
        return out + self._event(f"response.{whole['status']}", response=whole)

    def fail(self, message: str) -> bytes:
        failed = {**self._response, "status": "failed", "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=failed)

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                return self._begin_message() + self._say("response.output_text.delta", delta.text, content_index=0, logprobs=[])
            case ReasoningDelta():
                return self._begin_reasoning() + self._say("response.reasoning_text.delta", delta.text, content_index=0)
            case ToolStart():
                return self._begin_call(delta)
            case ToolArguments():
                if self._kind().type == "custom_tool_call":
                    self._text.append(delta.text)
                    return b""
                return self._say("response.function_call_arguments.delta", delta.text)

    def _begin_message(self) -> bytes:
        if self._open == "message":
            return b""
        out = self._begin("message", "msg", lambda item_id: _message_item(item_id, None, "in_progress"))
        return out + self._about("response.content_part.added", content_index=0, part=_part(""))

    def _begin_reasoning(self) -> bytes:
        if self._open == "reasoning":
            return b""
        return self._begin("reasoning", "rs", lambda item_id: _reasoning_item(item_id, ""))

    def _begin_call(self, start: ToolStart) -> bytes:
        out = self._close()
        self._use = ToolUse(id=start.id, name=start.name, arguments="")
        return out + self._begin("call", "fc", lambda item_id: _call_item(item_id, self._use, self._kind(), "in_progress"))

    def _begin(self, kind: str, prefix: str, item: Any) -> bytes:
        out = self._close()
        self._open, self._text = kind, []
        self._item_id = item_id(prefix, self._answer_id, len(self._output))
        index = len(self._output)
        return out + self._event("response.output_item.added", output_index=index, item=item(self._item_id))

    def _close(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        text = "".join(self._text)
        match kind:
            case "message":
                item = _message_item(self._item_id, text, "completed")
                out = self._about("response.output_text.done", content_index=0, text=text, logprobs=[])
                out += self._about("response.content_part.done", content_index=0, part=_part(text))
            case "reasoning":
                item = _reasoning_item(self._item_id, text)
                out = self._about("response.reasoning_text.done", content_index=0, text=text)
            case _:
                use = ToolUse(id=self._use.id, name=self._use.name, arguments=text or "{}")
                item = _call_item(self._item_id, use, self._kind(), "completed")
                out = self._call_done(use)
        out += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def _call_done(self, use: ToolUse) -> bytes:
        if self._kind().type == "custom_tool_call":
            text = _custom_input(use.arguments)
            out = self._about("response.custom_tool_call_input.delta", delta=text)
            return out + self._about("response.custom_tool_call_input.done", input=text)
        return self._about("response.function_call_arguments.done", arguments=use.arguments)

    def _kind(self) -> ToolKind:
        return _kind(self._tools, self._use.name)

    def _say(self, kind: str, text: str, **fields: object) -> bytes:
        self._text.append(text)
        return self._about(kind, delta=text, **fields)

    def _about(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._sequence += 1
        return sse.event(kind, {"type": kind, "sequence_number": self._sequence, **fields})


def _kind(tools: Tools, name: str) -> ToolKind:
    kind: ToolKind = tools.names.get(name, FUNCTION)
    return kind
