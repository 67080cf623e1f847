"""Anthropic Messages, with `count_tokens`, thinking blocks, and system messages in mid-conversation."""

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
from qwengyre.trajectory.match import KeyedTurn, ToolUse, Turn

BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code's first system block begins with it: for the server's eyes, different in every session."""
SIGNATURE: Final = "qwengyre"
"""Clients send thinking back only with a signature."""
RESULT_TEXTS: Final = {"text": "text", "tool_reference": "tool_name"}
"""Where a part of a tool result has its text; a tool that is referred to stands in `tools`, so its name is enough."""
STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    system: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = decode(body, _Body, "request body")
    if not asked.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    system = cache.get("messages system", asked.system, lambda raw: _parse_system(raw, cache))
    items = [cache.get("messages message", raw, lambda raw: _parse_message(raw, cache)) for raw in asked.messages]
    turns = (*system.turns, *(keyed for item in items for keyed in item.turns))
    system_text, system_digest = system_texts(turns)
    return ModelRequest(
        dialect="messages",
        turns=turns,
        tools=cache.get("messages tools", asked.tools, _parse_tools),
        model=asked.model,
        stream=bool(asked.stream),
        max_tokens=asked.max_tokens,
        stops=stop_strings(asked.stop_sequences),
        include_usage=True,
        system_text="\n".join((system.last_block, system_text)),
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def _parse_system(raw: bytes, cache: ItemCache) -> ParsedItem:
    """The system prompt; `last_block` is the billing block, which the model never sees."""
    blocks = decode(raw, str | list[_Block] | None, "system") or []
    texts = [blocks] if isinstance(blocks, str) else [_text(block) for block in blocks]
    billing = "\n".join(text for text in texts if text.startswith(BILLING))
    text = join_texts([text for text in texts if not text.startswith(BILLING)])
    turns = (cache.keyed(Turn(role="system", text=text)),) if text else ()
    return ParsedItem(turns=turns, last_block=billing)


def _parse_message(raw: bytes, cache: ItemCache) -> ParsedItem:
    message = decode(raw, _Message, "messages")
    blocks = [_Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    match message.role:
        case "system":
            turns: tuple[Turn, ...] = (Turn(role="system", text=join_texts([_text(block) for block in blocks])),)
        case "assistant":
            turns = (_assistant_turn(blocks, cache),)
        case "user":
            turns = _user_turns(blocks, cache)
        case role:
            raise InvalidRequest(f"messages: unknown role {role!r}", param="messages")
    last_block = blocks[-1].text or "" if blocks and blocks[-1].type == "text" else ""
    return ParsedItem(turns=tuple(cache.keyed(turn) for turn in turns), last_block=last_block)


def _user_turns(blocks: Sequence[_Block], cache: ItemCache) -> tuple[Turn, ...]:
    """Tool results are turns of their own; what else the user says follows them."""
    turns: list[Turn] = []
    texts: list[str] = []
    for block in blocks:
        if block.type == "tool_result":
            issued = cache.issued.get(block.tool_use_id)
            name = issued.name if issued else ""
            turns.append(Turn(role="tool", text=_result_text(block.content), tool_use_id=block.tool_use_id, name=name))
        else:
            texts.append(_text(block))
    if texts or not turns:
        turns.append(Turn(role="user", text=join_texts(texts)))
    return tuple(turns)


def _assistant_turn(blocks: Sequence[_Block], cache: ItemCache) -> Turn:
    texts, thoughts, uses = [], [], []
    for block in blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                use = ToolUse(id=block.id, name=block.name, arguments=bytes(block.input).decode())
                uses.append(cache.issued.get(block.id, use))
            case _:
                texts.append(_text(block))
    reasoning = "\n".join(thoughts) if thoughts else None
    return Turn(role="assistant", text=join_texts(texts), reasoning=reasoning, tool_uses=tuple(uses))


def _text(block: _Block) -> str:
    if block.type != "text" or block.text is None:
        raise InvalidRequest(f"this model reads text only, not {block.type!r} content", param="messages")
    return block.text


def _result_text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        text = part.get(RESULT_TEXTS.get(str(part.get("type")), ""))
        if not isinstance(text, str):
            raise InvalidRequest(f"this model reads text only, not {part.get('type')!r} in a tool result", param="messages")
        texts.append(text)
    return join_texts(texts)


def _parse_tools(raw: bytes) -> Tools:
    tools = decode(raw, list[_Tool] | None, "tools") or []
    return tools_of([function_spec(tool.name, tool.description, tool.input_schema) for tool in tools])


def usage(counted: Usage) -> dict:
    return {
        "input_tokens": counted.prompt - counted.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.completion,
    }


class Stream:
    """Deltas to server-sent events: one content block is open at a time."""

    def __init__(self, request: ModelRequest, answer_id: str, *, created: int, prompt_tokens: int):
        self._message = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(Usage(prompt=prompt_tokens, completion=0, cached=0)),
        }
        self._open: str | None = None
        self._index = -1

    def start(self) -> bytes:
        return sse.event("message_start", {"type": "message_start", "message": self._message})

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._delta(delta) for delta in sse.merged(deltas))

    def keep_alive(self) -> bytes:
        return sse.event("ping", {"type": "ping"})

    def end(self, ending: Ending) -> bytes:
        out = b"" if self._index >= 0 else self._begin("text", {"type": "text", "text": ""})
        out += self._close()
        reason = "stop_sequence" if ending.stop_string is not None else STOP_REASONS[ending.reason]
        delta = {"stop_reason": reason, "stop_sequence": ending.stop_string}
        out += sse.event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage(ending.usage)})
        return out + sse.event("message_stop", {"type": "message_stop"})

    def fail(self, message: str) -> bytes:
        return self._close() + sse.event("error", error(message, kind="api_error"))

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

    def _begin(self, kind: str, block: dict) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._open, self._index = kind, self._index + 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return out + sse.event("content_block_start", start)

    def _say(self, delta: dict) -> bytes:
        return sse.event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = self._say({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return out + sse.event("content_block_stop", {"type": "content_block_stop", "index": self._index})


def body(request: ModelRequest, answer_id: str, turn: Turn, ending: Ending, *, created: int) -> bytes:
    """The whole answer, not streamed."""
    content: list[dict] = []
    if turn.reasoning:
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": SIGNATURE})
    if turn.text or not turn.tool_uses:
        content.append({"type": "text", "text": turn.text})
    content += [{"type": "tool_use", "id": use.id, "name": use.name, "input": _input(use.arguments)} for use in turn.tool_uses]
    return sse.encode(
        {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": "stop_sequence" if ending.stop_string is not None else STOP_REASONS[ending.reason],
            "stop_sequence": ending.stop_string,
            "usage": usage(ending.usage),
        }
    )


def _input(arguments: str) -> object:
    """The arguments as an object; text that is no JSON object under the name that Claude Code gives it."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return {"__unparsedToolInput": arguments}


def count(num_tokens: int) -> bytes:
    """The answer to `count_tokens`."""
    return sse.encode({"input_tokens": num_tokens})


def error(message: str, *, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None) -> dict:
    return {"type": "error", "error": {"type": kind, "message": message}}


__all__ = ["KeyedTurn", "Stream", "body", "count", "error", "parse"]
