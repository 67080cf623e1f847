"""What a renderer can do with a conversation, found out by having it render some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from renderers.base import Message, Renderer, ToolCall

from qwengyre.gateway.protocol.fields import Json
from qwengyre.gateway.templates.probes import TOOLS, renderer_tools
from qwengyre.gateway.tokenizer import FastTokenizer

_FIRST, _LATER = "first-rule", "later-rule"
_SYSTEM: Final[Message] = {"role": "system", "content": _FIRST}
_LATER_SYSTEM: Final[Message] = {"role": "system", "content": _LATER}
_USER: Final[Message] = {"role": "user", "content": "question"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "answer"}
_BROKEN = '{"broken'
_RESULT: Final[Message] = {"role": "tool", "tool_call_id": "call-0", "name": "find", "content": "result"}


class Abilities(msgspec.Struct, frozen=True):
    has_later_system: bool
    """A system message after the first turn is rendered where it stands."""
    has_tools: bool
    """Tools are told to the policy."""
    takes_any_arguments: bool
    """Arguments of a call need not be a JSON object."""


def abilities_of(tokenizer: FastTokenizer, renderer: Renderer) -> Abilities:
    plain, told = _text(tokenizer, renderer, [_USER]), _text(tokenizer, renderer, [_USER], TOOLS)
    return Abilities(
        has_later_system=_has_later_system(tokenizer, renderer),
        has_tools=told is not None and told != plain,
        takes_any_arguments=all(
            arguments in (_text(tokenizer, renderer, [_USER, _called(arguments), _RESULT]) or "")
            for arguments in (_BROKEN, "null")
        ),
    )


def _called(arguments: str) -> Message:
    call: ToolCall = {"id": "call-0", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _has_later_system(tokenizer: FastTokenizer, renderer: Renderer) -> bool:
    for messages in ([_SYSTEM, _USER, _LATER_SYSTEM], [_SYSTEM, _USER, _ANSWER, _LATER_SYSTEM, _USER]):
        text = _text(tokenizer, renderer, messages)
        if text is None or not -1 < text.find("question") < text.find(_LATER):
            return False
    prompt = _ids(renderer, [_SYSTEM, _USER]) or []
    for stop in renderer.get_stop_token_ids():
        answer = [*tokenizer.encode("answer"), stop]
        if renderer.bridge_to_next_turn(prompt, answer, [_RESULT]) is not None:
            return renderer.bridge_to_next_turn(prompt, answer, [_RESULT, _LATER_SYSTEM]) is not None
    return True


def _text(tokenizer: FastTokenizer, renderer: Renderer, messages: list[Message], tools: Sequence[Json] = ()) -> str | None:
    ids = _ids(renderer, messages, tools)
    return None if ids is None else tokenizer.decode(ids)


def _ids(renderer: Renderer, messages: list[Message], tools: Sequence[Json] = ()) -> list[int] | None:
    """None when the renderer refuses."""
    try:
        return renderer.render_ids(messages, tools=renderer_tools(tools), add_generation_prompt=True)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
