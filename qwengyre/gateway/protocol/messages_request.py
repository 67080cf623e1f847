"""Anthropic Messages, the way in: messages to turns, with thinking blocks, and system messages in mid-conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from qwengyre.gateway.protocol.fields import (
    ACCOUNT,
    ANY_MODEL,
    CACHE,
    OF_THE_PROVIDER,
    SAMPLING,
    TEMPLATE,
    UNCONSTRAINED,
    Body,
    Field,
    Honored,
    Ignored,
    InvalidRequest,
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
    first_user_text,
    function_spec,
    join_texts,
    join_thoughts,
    last_user_block,
    stop_strings,
    system_texts,
    tools_of,
    written_arguments,
)
from qwengyre.trajectory.match import ToolUse, Turn

BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code's first system block begins with it: for the server's eyes, different in every session."""
RESULT_TEXTS: Final = {"text": "text", "tool_reference": "tool_name"}
"""Where a part of a tool result has its text; a tool that is referred to stands in `tools`, so its name is enough."""
FIELDS: Final[dict[str, Field]] = {
    "messages": Honored(),
    "model": ANY_MODEL,
    "system": Honored("Claude Code's billing block is left out: it is different in every session"),
    "tools": Honored(),
    "tool_choice": Honored(
        "`auto`, `none` and `disable_parallel_tool_use` (nothing after the first call counts); `any` or a tool's name is ignored: the "
        "policy is not constrained"
    ),
    "stream": Honored(),
    "max_tokens": Honored("from 1 on; at most `gateway.max_tokens_per_call`"),
    "stop_sequences": Honored("up to 16"),
    "output_config": Ignored("its effort: the run's chat template sets how the policy thinks and writes"),
    "output_config.format": RefusedField(UNCONSTRAINED),
    "output_format": RefusedField(UNCONSTRAINED),
    "compaction": RefusedField("ask for a summary in a message"),
    "container": RefusedField("there is no container here: leave this out"),
    "mcp_servers": RefusedField("the harness must call MCP servers itself", unless=([],)),
    "thread": RefusedField("send all messages with every request"),
    "thinking": TEMPLATE,
    "temperature": SAMPLING,
    "top_p": SAMPLING,
    "top_k": SAMPLING,
    "context_management": Ignored("the context is what the client sends; what is too long is an error"),
    "cache_control": CACHE,
    "betas": Ignored("what works does without them"),
    "billing_policy": ACCOUNT,
    "diagnostics": ACCOUNT,
    "fallback_credit_token": ACCOUNT,
    "fallbacks": ACCOUNT,
    "inference_geo": ACCOUNT,
    "metadata": ACCOUNT,
    "service_tier": ACCOUNT,
    "speed": ACCOUNT,
    "user_profile_id": ACCOUNT,
    "workspace_id": ACCOUNT,
}
MESSAGE: Final[dict[str, Field]] = {"role": Honored("`user`, `assistant`, `system`"), "content": Honored()}
BLOCKS: Final[dict[str, Field]] = {
    "text": Honored("`citations` and `cache_control` are ignored: a chat template has no place for them"),
    "thinking": Honored("of an assistant's message; `signature` is ignored: the text itself is matched"),
    "redacted_thinking": Ignored("nobody here can read it"),
    "tool_use": Honored(),
    "tool_result": Honored("`is_error` is ignored: a chat template has no place for it, and the text says so"),
    "image": LEFT_OUT,
    "document": LEFT_OUT,
    "search_result": LEFT_OUT,
    "container_upload": LEFT_OUT,
    "server_tool_use": OF_THE_PROVIDER,
    "mcp_tool_use": OF_THE_PROVIDER,
    "mcp_tool_result": OF_THE_PROVIDER,
    "web_search_tool_result": OF_THE_PROVIDER,
    "web_fetch_tool_result": OF_THE_PROVIDER,
    "code_execution_tool_result": OF_THE_PROVIDER,
    "bash_code_execution_tool_result": OF_THE_PROVIDER,
    "text_editor_code_execution_tool_result": OF_THE_PROVIDER,
    "tool_search_tool_result": OF_THE_PROVIDER,
    "compaction": OF_THE_PROVIDER,
}
RESULT_PARTS: Final[dict[str, Field]] = {
    "text": Honored(),
    "tool_reference": Honored("as the tool's name"),
    "image": LEFT_OUT,
    "document": LEFT_OUT,
    "search_result": LEFT_OUT,
}
TOOLS: Final[dict[str, Field]] = {
    "custom": Honored(
        "`name`, `description`, `input_schema`; `strict`, `defer_loading`, `allowed_callers`, `input_examples`, `cache_control` and "
        "`eager_input_streaming` are ignored: a chat template has no place for them"
    ),
    "any other": Ignored("a tool that the provider runs, or whose schema only the provider knows: the policy is not offered it"),
}


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None
    source: Any = None
    title: Any = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = Body.read(body, FIELDS)
    messages = asked.get("messages", list[msgspec.Raw], [])
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    system = cache.get("messages system", asked.raw("system"), lambda raw: _parse_system(raw, cache))
    items = [cache.get("messages message", raw, lambda raw: _parse_message(raw, cache)) for raw in messages]
    turns = (*system.turns, *(keyed for item in items for keyed in item.turns))
    system_text, system_digest = system_texts(turns)
    tools, ignored_tools = cache.get("messages tools", asked.raw("tools"), _parse_tools)
    for name in ignored_tools:
        asked.ignore(f"tools.{name}")
    return ModelRequest(
        dialect="messages",
        turns=turns,
        tools=tools,
        model=asked.get("model", str, ""),
        stream=asked.get("stream", bool, False),
        max_tokens=asked.count("max_tokens"),
        stops=stop_strings(asked.get("stop_sequences", list[str], [])),
        calls=_calls(asked, tools),
        ignored=asked.ignored,
        include_usage=True,
        system_text="\n".join((system.last_block, system_text)),
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def _calls(asked: Body, tools: Tools) -> CallLimit:
    choice = asked.get("tool_choice", _ToolChoice, _ToolChoice("auto"))
    if choice.type == "none":
        return CallLimit.NONE
    if choice.type not in ("auto", "any", "tool"):
        raise InvalidRequest("tool_choice must be of type auto, any, tool or none", param="tool_choice")
    if choice.type == "tool":
        tools.need(choice.name)
    if choice.type != "auto":
        asked.ignore("tool_choice")
    return CallLimit.ONE if choice.disable_parallel_tool_use else CallLimit.ANY


def _parse_system(raw: bytes, cache: ItemCache) -> ParsedItem:
    """The system prompt; `last_block` is the billing block, which the model never sees."""
    blocks: str | list[_Block] = decode(raw, str | list[_Block] | None, "system") or []
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
                use = ToolUse(id=block.id, name=block.name, arguments=written_arguments(block.input))
                uses.append(cache.issued.get(block.id, use))
            case _:
                texts.append(_text(block))
    return Turn(role="assistant", text=join_texts(texts), reasoning=join_thoughts(thoughts), tool_uses=tuple(uses))


def _text(block: _Block) -> str:
    text = block.text if block.type == "text" else text_instead(msgspec.structs.asdict(block))
    if text is None:
        raise refusal(BLOCKS, block.type, "messages")
    return text


def _result_text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        text = part.get(RESULT_TEXTS.get(str(part.get("type")), ""), text_instead(part))
        if not isinstance(text, str):
            raise refusal(RESULT_PARTS, part.get("type"), "messages")
        texts.append(text)
    return join_texts(texts)


def _parse_tools(raw: bytes) -> tuple[Tools, list[str]]:
    """The tools that the policy is offered, and the types of those that it is not."""
    tools: list[_Tool] = decode(raw, list[_Tool] | None, "tools") or []
    own = [tool for tool in tools if tool.type in (None, "custom")]
    if not all(tool.name for tool in own):
        raise InvalidRequest("tools: a tool without a name", param="tools")
    ignored = sorted({tool.type for tool in tools if tool.type not in (None, "custom")})
    return tools_of([function_spec(tool.name, tool.description, tool.input_schema) for tool in own]), ignored
