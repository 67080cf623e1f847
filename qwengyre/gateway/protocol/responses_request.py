"""OpenAI Responses, the way in: items to turns. Items that the model made together (reasoning, message, tool calls) are one turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

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
    system_texts,
    tools_of,
)
from qwengyre.trajectory.match import KeyedTurn, ToolUse, Turn, TurnRole

ROLES: dict[str, TurnRole] = {"system": "system", "developer": "system", "user": "user"}
CALL_TYPES = ("function_call", "custom_tool_call")
OUTPUT_TYPES = ("function_call_output", "custom_tool_call_output")


class ToolKind(msgspec.Struct, frozen=True):
    """How a tool's call is said back."""

    type: Literal["function_call", "custom_tool_call"] = "function_call"
    namespace: str | None = None


class _Body(msgspec.Struct):
    input: msgspec.Raw
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None


class _Fragment(msgspec.Struct, frozen=True):
    """A part of what the model said."""

    text: str = ""
    reasoning: str | None = None
    use: ToolUse | None = None


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = decode(body, _Body, "request body")
    if asked.previous_response_id:
        raise InvalidRequest("answers are not stored: send the whole input", param="previous_response_id")
    items = _items(asked.input, cache)
    if not items:
        raise InvalidRequest("input must not be empty", param="input")
    instructions = (cache.keyed(Turn(role="system", text=asked.instructions)),) if asked.instructions else ()
    turns = (*instructions, *(keyed for item in items for keyed in item.turns))
    system_text, system_digest = system_texts(turns)
    return ModelRequest(
        dialect="responses",
        turns=turns,
        tools=cache.get("responses tools", asked.tools, _parse_tools),
        model=asked.model,
        stream=bool(asked.stream),
        max_tokens=asked.max_output_tokens,
        stops=(),
        include_usage=True,
        system_text=system_text,
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def _items(raw: bytes, cache: ItemCache) -> list[ParsedItem]:
    if bytes(memoryview(raw)[:1]) == b'"':
        text = decode(raw, str, "input")
        return [ParsedItem(turns=(cache.keyed(Turn(role="user", text=text)),), last_block=text)]
    out: list[ParsedItem] = []
    run: list[tuple[bytes, _Fragment]] = []
    for item_raw in decode(raw, list[msgspec.Raw], "input"):
        part = cache.get("responses item", item_raw, lambda raw: _parse_item(raw, cache))
        if isinstance(part, _Fragment):
            if run and not _goes_on(run[-1][1], part):
                out.append(_answer(run, cache))
                run = []
            run.append((item_raw, part))
            continue
        if run:
            out.append(_answer(run, cache))
            run = []
        out.append(part)
    if run:
        out.append(_answer(run, cache))
    return out


def _goes_on(last: _Fragment, part: _Fragment) -> bool:
    """The order within one answer is reasoning, text, tool calls; going back begins another."""
    return _stage(part) >= _stage(last) and not (part.reasoning is not None and last.reasoning is not None)


def _stage(part: _Fragment) -> int:
    return 0 if part.reasoning is not None else 2 if part.use is not None else 1


def _answer(run: Sequence[tuple[bytes, _Fragment]], cache: ItemCache) -> ParsedItem:
    return ParsedItem(turns=(cache.keyed_run([raw for raw, _ in run], lambda: _join([part for _, part in run])),))


def _join(parts: Sequence[_Fragment]) -> Turn:
    return Turn(
        role="assistant",
        text=join_texts([part.text for part in parts if part.text]),
        reasoning=next((part.reasoning for part in parts if part.reasoning is not None), None),
        tool_uses=tuple(part.use for part in parts if part.use is not None),
    )


def _parse_item(raw: bytes, cache: ItemCache) -> ParsedItem | _Fragment:
    item = decode(raw, _Item, "input")
    if item.type == "reasoning":
        return _Fragment(reasoning=join_texts(_texts(item.content) or _texts(item.summary)))
    if item.type in CALL_TYPES:
        arguments = item.arguments if item.type == "function_call" else msgspec.json.encode({"input": item.input}).decode()
        use = ToolUse(id=item.call_id, name=item.name, arguments=arguments or "{}")
        return _Fragment(use=cache.issued.get(item.call_id, use))
    if item.type in OUTPUT_TYPES:
        issued = cache.issued.get(item.call_id)
        turn = Turn(
            role="tool", text=join_texts(_texts(item.output)), tool_use_id=item.call_id, name=issued.name if issued else ""
        )
        return ParsedItem(turns=(cache.keyed(turn),))
    if item.type != "message":
        raise InvalidRequest(f"input: items of type {item.type!r} are not understood", param="input")
    texts = _texts(item.content)
    if item.role == "assistant":
        return _Fragment(text=join_texts(texts))
    role = ROLES.get(item.role or "")
    if role is None:
        raise InvalidRequest(f"input: unknown role {item.role!r}", param="input")
    keyed: KeyedTurn = cache.keyed(Turn(role=role, text=join_texts(texts)))
    return ParsedItem(turns=(keyed,), last_block=texts[-1] if texts else "")


def _texts(content: str | Sequence[dict[str, Any]] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content or ():
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise InvalidRequest(f"this model reads text only, not {part.get('type')!r} content", param="input")
        texts.append(text)
    return texts


def _parse_tools(raw: bytes) -> Tools:
    tools = decode(raw, list[dict[str, Any]] | None, "tools") or []
    specs: list[dict] = []
    kinds: dict[str, ToolKind] = {}
    for tool in tools:
        if tool.get("type") == "namespace":
            for inner in tool.get("tools") or ():
                _add_tool(inner, tool.get("name"), specs, kinds)
        else:
            _add_tool(tool, None, specs, kinds)
    return tools_of(specs, kinds)


def _add_tool(tool: dict[str, Any], namespace: str | None, specs: list[dict], kinds: dict[str, ToolKind]) -> None:
    """A tool that this model can call; tools of the provider's own (web search) are left out."""
    name = tool.get("name")
    if not isinstance(name, str) or tool.get("type") not in ("function", "custom"):
        return
    if tool["type"] == "custom":
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        specs.append(function_spec(name, tool.get("description"), text))
        kinds[name] = ToolKind(type="custom_tool_call", namespace=namespace)
    else:
        specs.append(function_spec(name, tool.get("description"), tool.get("parameters")))
        kinds[name] = ToolKind(namespace=namespace)
