"""OpenAI Chat Completions, the way in: messages to turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from qwengyre.gateway.protocol.fields import (
    ACCOUNT,
    ANY_MODEL,
    CACHE,
    SAMPLING,
    TEMPLATE,
    TEXT_ONLY,
    UNCONSTRAINED,
    Body,
    Field,
    Honored,
    Ignored,
    InvalidRequest,
    Json,
    RefusedField,
    decode,
    refusal,
)
from qwengyre.gateway.protocol.media import LEFT_OUT, text_instead
from qwengyre.gateway.protocol.request import (
    CallLimit,
    ItemCache,
    ModelRequest,
    ParsedItem,
    Tools,
    arguments_text,
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
FIELDS: Final[dict[str, Field]] = {
    "messages": Honored(),
    "model": ANY_MODEL,
    "tools": Honored(),
    "tool_choice": Honored("`auto` and `none`; `required` or a tool's name is ignored: the policy is not constrained"),
    "parallel_tool_calls": Honored("`false`: nothing after the first call counts"),
    "stream": Honored(),
    "stream_options": Honored("`include_usage`; `include_obfuscation` is ignored: the network is the run's own"),
    "max_completion_tokens": Honored("from 1 on; at most `gateway.max_tokens_per_call`"),
    "max_tokens": Honored("as `max_completion_tokens`, which goes before it"),
    "stop": Honored("up to 16"),
    "n": RefusedField("ask once for every answer that you want", unless=(1,)),
    "functions": RefusedField("send them as tools", unless=([],)),
    "function_call": RefusedField("send tools and tool_choice", unless=("auto", "none")),
    "response_format": RefusedField(UNCONSTRAINED, unless=({"type": "text"},)),
    "logit_bias": RefusedField("the policy is not constrained: leave this out", unless=({},)),
    "logprobs": RefusedField("log-probs are recorded, not returned: leave this out", unless=(False,)),
    "top_logprobs": RefusedField("log-probs are recorded, not returned: leave this out", unless=(0,)),
    "modalities": RefusedField("the policy writes text: leave this out", unless=(["text"],)),
    "audio": TEXT_ONLY,
    "moderation": RefusedField("nothing is moderated here: leave this out"),
    "web_search_options": RefusedField("there is no search at the provider: give the policy a tool that searches"),
    "temperature": SAMPLING,
    "top_p": SAMPLING,
    "frequency_penalty": SAMPLING,
    "presence_penalty": SAMPLING,
    "seed": SAMPLING,
    "reasoning_effort": TEMPLATE,
    "verbosity": TEMPLATE,
    "prediction": Ignored("it changes how fast a provider answers, not what"),
    "prompt_cache_key": CACHE,
    "prompt_cache_options": CACHE,
    "prompt_cache_retention": CACHE,
    "metadata": ACCOUNT,
    "safety_identifier": ACCOUNT,
    "service_tier": ACCOUNT,
    "store": ACCOUNT,
    "user": ACCOUNT,
}
MESSAGE: Final[dict[str, Field]] = {
    "role": Honored("`developer` is `system`, `function` is `tool`"),
    "content": Honored(),
    "reasoning_content": Honored("of an assistant's message"),
    "reasoning": Honored("of an assistant's message, where there is no `reasoning_content`"),
    "refusal": Honored("as text, where there is no content"),
    "tool_calls": Honored("those of type `function`"),
    "tool_call_id": Honored(),
    "name": Honored("of a tool's message; others are ignored: a chat template has no place for it"),
    "function_call": RefusedField("send tool_calls"),
    "audio": RefusedField("the policy reads text only"),
}
PARTS: Final[dict[str, Field]] = {
    "text": Honored(),
    "refusal": Honored("as text"),
    "thinking": Honored("of an assistant's message, as its reasoning"),
    "reasoning": Honored("of an assistant's message, as its reasoning"),
    "image_url": LEFT_OUT,
    "input_audio": LEFT_OUT,
    "file": LEFT_OUT,
}
TOOLS: Final[dict[str, Field]] = {
    "function": Honored("`name`, `description`, `parameters`; `strict` is ignored: the policy is not constrained"),
    "custom": RefusedField("give the policy a function with one string argument"),
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    id: str = ""
    type: str | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None
    type: str = "function"


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None
    audio: Any = None


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _ToolChoice(msgspec.Struct):
    type: str
    function: _Named = _Named()


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = Body.read(body, FIELDS)
    messages = asked.get("messages", list[msgspec.Raw], [])
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    items = [cache.get("chat message", raw, lambda raw: _parse_message(raw, cache)) for raw in messages]
    turns = tuple(keyed for item in items for keyed in item.turns)
    tools = cache.get("chat tools", asked.raw("tools"), _parse_tools)
    system_text, system_digest = system_texts(turns)
    max_tokens = asked.count("max_tokens")
    return ModelRequest(
        dialect="chat",
        turns=turns,
        tools=tools,
        model=asked.get("model", str, ""),
        stream=asked.get("stream", bool, False),
        max_tokens=asked.count("max_completion_tokens") or max_tokens,
        stops=stop_strings(asked.get("stop", str | list[str], ())),
        calls=_calls(asked, tools),
        ignored=asked.ignored,
        include_usage=bool(asked.get("stream_options", _StreamOptions, _StreamOptions()).include_usage),
        system_text=system_text,
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def _calls(asked: Body, tools: Tools) -> CallLimit:
    choice: str | _ToolChoice = asked.get("tool_choice", str | _ToolChoice, "auto")
    is_parallel = asked.get("parallel_tool_calls", bool, True)
    if choice == "none":
        return CallLimit.NONE
    if choice == "required" or (isinstance(choice, _ToolChoice) and choice.type == "function"):
        if isinstance(choice, _ToolChoice):
            tools.need(choice.function.name)
        asked.ignore("tool_choice")
    elif choice != "auto":
        raise InvalidRequest(
            "tool_choice must be auto, none, required or a function: send only the tools that may be called", param="tool_choice"
        )
    return CallLimit.ANY if is_parallel else CallLimit.ONE


def _parse_message(raw: bytes, cache: ItemCache) -> ParsedItem:
    message = decode(raw, _Message, "messages")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"messages: unknown role {message.role!r}", param="messages")
    for name, value in (("function_call", message.function_call), ("audio", message.audio)):
        if value is not None:
            raise refusal(MESSAGE, name, "messages")
    texts, thoughts = _texts(message.content if message.content is not None else message.refusal, role)
    uses = tuple(_tool_use(call) for call in message.tool_calls or ())
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is None and thoughts:
        reasoning = "\n".join(thoughts)
    turn = Turn(
        role=role,
        text=join_texts(texts),
        reasoning=reasoning if role == "assistant" else None,
        tool_uses=tuple(cache.issued.get(use.id, use) for use in uses),
        tool_use_id=message.tool_call_id or "",
        name=(message.name or _issued_name(cache, message.tool_call_id)) if role == "tool" else "",
    )
    return ParsedItem(turns=(cache.keyed(turn),), last_block=texts[-1] if texts else "")


def _tool_use(call: _ToolCall) -> ToolUse:
    if call.function is None:
        raise refusal(TOOLS, call.type, "messages")
    return ToolUse(id=call.id, name=call.function.name, arguments=arguments_text(call.function.arguments))


def _issued_name(cache: ItemCache, tool_use_id: str | None) -> str:
    issued = cache.issued.get(tool_use_id or "")
    return issued.name if issued else ""


def _texts(content: str | list[_Part] | None, role: TurnRole) -> tuple[list[str], list[str]]:
    """Texts and thoughts of a message."""
    if isinstance(content, str):
        return [content], []
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content or ():
        if part.type in ("thinking", "reasoning") and role == "assistant":
            thoughts.append(part.thinking or part.text or "")
            continue
        text = part.text if part.text is not None else part.refusal
        if text is None:
            text = text_instead(msgspec.structs.asdict(part))
        if text is None:
            raise refusal(PARTS, part.type, "messages")
        texts.append(text)
    return texts, thoughts


def _parse_tools(raw: bytes) -> Tools:
    functions: list[_Function] = []
    tools: list[_Tool] = decode(raw, list[_Tool] | None, "tools") or []
    for tool in tools:
        if tool.function is None:
            raise refusal(TOOLS, tool.type, "tools")
        functions.append(tool.function)
    return tools_of([function_spec(function.name, function.description, function.parameters) for function in functions])


def tool_calls(uses: Sequence[ToolUse]) -> list[Json]:
    """Tool calls as they stand in a message."""
    return [{"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}} for use in uses]
