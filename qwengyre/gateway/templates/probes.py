"""Conversations that tell chat templates apart, and what a renderer or a template makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
from renderers.base import Message, Renderer, ToolCall, ToolSpec

from qwengyre.gateway.protocol.fields import Json
from qwengyre.gateway.templates.jinja import TemplateRefused
from qwengyre.gateway.tokenizer import FastTokenizer


class ProbeConversation(msgspec.Struct, frozen=True):
    """A conversation that tells templates apart."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()


def _call(name: str, **arguments: Any) -> ToolCall:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_reasoning(message: Message) -> Message:
    plain = message.copy()
    plain.pop("reasoning_content", None)
    return plain


USER: Final[Message] = {"role": "user", "content": "Which files?"}
_SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}
TOOLS: Final[tuple[Json, ...]] = tuple(
    {"type": "function", "function": {"name": name, "description": "Says <so> \u00e9.", "parameters": parameters}}
    for name, parameters in (
        ("find", {"type": "object", "properties": {"path": {"type": "string", "description": "Where"}}, "required": ["path"]}),
        ("sum", {"type": "object", "properties": {"terms": {"type": "array", "items": {"type": "integer"}}}}),
    )
)
CALLED: Final[tuple[Message, ...]] = (
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "They want files.",
        "tool_calls": [_call("find", path="src/\u00e9", deep=True), _call("sum", terms=[1, 2], how={"a": None})],
    },
    {"role": "tool", "name": "find", "tool_call_id": "call-find", "content": "a.py"},
    {"role": "tool", "name": "sum", "tool_call_id": "call-sum", "content": "3"},
)
_ANSWERED: Final[Message] = {"role": "assistant", "content": "One.", "reasoning_content": "It is one."}
REASONED: Final = (
    ProbeConversation((USER,)),
    ProbeConversation((_SYSTEM, USER)),
    ProbeConversation((_SYSTEM, USER, _ANSWERED, USER)),
    ProbeConversation((_SYSTEM, USER, *CALLED), TOOLS),
    ProbeConversation((USER, *CALLED, _ANSWERED, USER), TOOLS),
)
"""Every answer has reasoning."""
PLAIN: Final = tuple(
    ProbeConversation(tuple(_without_reasoning(message) for message in messages), tools)
    for messages, tools in ((probe.messages, probe.tools) for probe in REASONED)
)
"""The same without: what a policy sees that does not reason. With reasoning switched off, a renderer may keep to its template in one
of the two only: it repeats the empty reasoning that it put before an answer, where most templates drop it."""


def renderer_tools(tools: Sequence[Json]) -> list[ToolSpec] | None:
    """Tools as renderers are given them, which type a tool by its function alone and take it whole, too."""
    return cast(list[ToolSpec], list(tools)) or None


def rendered(renderer: Renderer, probe: ProbeConversation) -> list[int] | None:
    """None when the renderer refuses such a conversation."""
    try:
        return renderer.render_ids(list(probe.messages), tools=renderer_tools(probe.tools), add_generation_prompt=True)
    except (LookupError, TypeError, ValueError):
        return None


def rendered_by_template(tokenizer: FastTokenizer, probe: ProbeConversation) -> list[int] | None:
    """The same by the folder's own template."""
    try:
        return tokenizer.apply_chat_template(probe.messages, tools=probe.tools, add_generation_prompt=True)
    except TemplateRefused:
        return None
