"""What a chat template of its own does with tool calls, found out by having it write one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

import msgspec
from renderers.base import ParsedToolCall, Renderer

from qwengyre.gateway.protocol.fields import Json
from qwengyre.gateway.templates.jinja import TemplateRefused
from qwengyre.gateway.templates.probes import TOOLS, USER, renderer_tools
from qwengyre.gateway.tokenizer import FastTokenizer

NAME: Final = "find"
ARGUMENTS: Final = {"path": "src/\u00e9"}
AS_TEXT: Final = json.dumps(ARGUMENTS, ensure_ascii=False)


class CallFormat(msgspec.Struct, frozen=True):
    """How a template has its calls."""

    reader: Renderer | None
    """What reads back a call that the template wrote; None when it has no calls, or writes them in a form that nobody knows."""
    takes_text: bool
    """Arguments may be given as JSON text, and stand in the conversation just so: as the policy wrote them."""


def find_calls(tokenizer: FastTokenizer, candidates: Iterable[Renderer]) -> CallFormat:
    known = list(candidates)
    for arguments in (AS_TEXT, ARGUMENTS):
        reader = _find_reader(tokenizer, arguments, known)
        if reader is not None:
            return CallFormat(reader, takes_text=isinstance(arguments, str))
    return CallFormat(None, takes_text=False)


def _find_reader(tokenizer: FastTokenizer, arguments: str | Json, candidates: Iterable[Renderer]) -> Renderer | None:
    template = tokenizer.need_template()
    try:
        prompt = template.render([USER], tools=TOOLS, add_generation_prompt=True)
        whole = template.render([USER, _answer(arguments)], tools=TOOLS)
    except TemplateRefused:
        return None
    shared = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    prompt_ids, ids = tokenizer.encode(whole[:shared]), tokenizer.encode(whole[shared:])
    for candidate in candidates:
        read = candidate.parse_response(list(ids), tools=renderer_tools(TOOLS), prompt_ids=list(prompt_ids)).tool_calls
        if len(read) == 1 and _is_the_call(read[0]):
            return candidate
    return None


def _answer(arguments: str | Json) -> Json:
    call = {"id": "call-0", "type": "function", "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _is_the_call(read: ParsedToolCall) -> bool:
    return read.name == NAME and read.arguments == ARGUMENTS
