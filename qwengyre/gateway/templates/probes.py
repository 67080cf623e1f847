"""Conversations that tell chat templates apart, and what a renderer or a template makes of them."""

from __future__ import annotations

from typing import Final

import msgspec
from renderers.base import Renderer

from qwengyre.gateway.templates.jinja import TemplateRefused
from qwengyre.gateway.tokenizer import FastTokenizer


class ProbeConversation(msgspec.Struct, frozen=True):
    """A conversation that tells templates apart."""

    messages: tuple[dict, ...]
    tools: tuple[dict, ...] = ()


def _call(name: str, **arguments: object) -> dict:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


USER: Final = {"role": "user", "content": "Which files?"}
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
TOOLS: Final = tuple(
    {"type": "function", "function": {"name": name, "description": "Says <so> \u00e9.", "parameters": parameters}}
    for name, parameters in (
        ("find", {"type": "object", "properties": {"path": {"type": "string", "description": "Where"}}, "required": ["path"]}),
        ("sum", {"type": "object", "properties": {"terms": {"type": "array", "items": {"type": "integer"}}}}),
    )
)
CALLED: Final = (
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "They want files.",
        "tool_calls": [_call("find", path="src/\u00e9", deep=True), _call("sum", terms=[1, 2], how={"a": None})],
    },
    {"role": "tool", "name": "find", "tool_call_id": "call-find", "content": "a.py"},
    {"role": "tool", "name": "sum", "tool_call_id": "call-sum", "content": "3"},
)
_ANSWERED: Final = {"role": "assistant", "content": "One.", "reasoning_content": "It is one."}
REASONED: Final = (
    ProbeConversation((USER,)),
    ProbeConversation((_SYSTEM, USER)),
    ProbeConversation((_SYSTEM, USER, _ANSWERED, USER)),
    ProbeConversation((_SYSTEM, USER, *CALLED), TOOLS),
    ProbeConversation((USER, *CALLED, _ANSWERED, USER), TOOLS),
)
"""Every answer has reasoning."""
PLAIN: Final = tuple(
    ProbeConversation(
        tuple({key: value for key, value in message.items() if key != "reasoning_content"} for message in messages), tools
    )
    for messages, tools in ((probe.messages, probe.tools) for probe in REASONED)
)
"""The same without: what a policy sees that does not reason. With reasoning switched off, a renderer may keep to its template in one
of the two only: it repeats the empty reasoning that it put before an answer, where most templates drop it."""


def rendered(renderer: Renderer, probe: ProbeConversation) -> list[int] | None:
    """None when the renderer refuses such a conversation."""
    try:
        return renderer.render_ids(list(probe.messages), tools=list(probe.tools) or None, add_generation_prompt=True)
    except (LookupError, TypeError, ValueError):
        return None


def rendered_by_template(tokenizer: FastTokenizer, probe: ProbeConversation) -> list[int] | None:
    """The same by the folder's own template."""
    try:
        return tokenizer.apply_chat_template(probe.messages, tools=probe.tools, add_generation_prompt=True)
    except TemplateRefused:
        return None
