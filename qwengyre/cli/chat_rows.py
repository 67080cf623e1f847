"""A trajectory's tokens back to chat messages, for supervised training elsewhere.

The journal keeps tokens, not messages, so the messages are read off the tokens: turns of the ChatML family
(`<|im_start|>role ... <|im_end|>`, as all Qwen models have them), tool specifications from the system prompt, tool results from user turns, and
answers by the `renderers` package, as the gateway itself parses them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from qwengyre.core.errors import ConfigError

_TOOLS = re.compile(r"\n*# Tools\n.*?<tools>\n(.*?)\n</tools>.*?\n</tool_call>(?:\s*<IMPORTANT>.*?</IMPORTANT>)?", re.DOTALL)
_HEADER_TOKENS = 24
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


class ParsedAnswer(msgspec.Struct, frozen=True):
    """One assistant turn, parsed."""

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    """(name, arguments as JSON text)"""


class Chatml(msgspec.Struct, frozen=True):
    """How to read one tokenizer's turns."""

    start: int
    end: int
    decode: Callable[[list[int]], str]
    parse: Callable[[list[int]], ParsedAnswer]


class ChatRow(msgspec.Struct, frozen=True):
    messages: list[dict]
    """OpenAI form; an assistant message has `weight` 1 if any of its tokens is trained, else 0."""
    tools: list[dict]


def chat_row(token_ids_T: np.ndarray, trainable_T: np.ndarray, chatml: Chatml) -> ChatRow:
    """Read the turns of one path. Raises ConfigError when it has none: the tokenizer is another one, or no ChatML."""
    starts = np.flatnonzero(token_ids_T == chatml.start)
    if not len(starts):
        raise ConfigError("the tokens hold no <|im_start|>: give the run's own tokenizer, or export Parquet", key="--tokenizer")
    messages: list[dict] = []
    tools: list[dict] = []
    bounds = [*starts.tolist(), len(token_ids_T)]
    for start, stop in itertools.pairwise(bounds):
        ids = token_ids_T[start + 1 : stop].tolist()
        ids = ids[: ids.index(chatml.end)] if chatml.end in ids else ids
        is_trained = bool(trainable_T[start:stop].any())
        messages += _messages(ids, chatml, is_trained, tools)
    _pair_tool_calls(messages)
    return ChatRow(messages, tools)


def _pair_tool_calls(messages: Sequence[dict]) -> None:
    """Number the tool calls, and give each result the number of its call: results follow in the order of the calls."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = f"call_{count}"
            waiting.append(call["id"])
            count += 1
        if message["role"] == "tool":
            message["tool_call_id"] = waiting.pop(0) if waiting else ""


def _messages(ids: list[int], chatml: Chatml, is_trained: bool, tools: list[dict]) -> list[dict]:
    role, _, text = chatml.decode(ids).partition("\n")
    role = role.strip()
    if role == "assistant":
        return [_assistant(ids, chatml, is_trained)]
    if role == "system":
        text, specs = split_tools(text)
        tools += specs
    if role == "user" and text.lstrip().startswith("<tool_response>"):
        return [{"role": "tool", "content": result} for result in _TOOL_RESPONSE.findall(text)]
    return [{"role": role, "content": text}] if text or role != "system" else []


def _assistant(ids: list[int], chatml: Chatml, is_trained: bool) -> dict:
    header = next(
        (index for index in range(1, min(_HEADER_TOKENS, len(ids))) if chatml.decode(ids[:index]).endswith("\n")), len(ids)
    )
    answer = chatml.parse(ids[header:])
    message: dict = {"role": "assistant", "content": answer.content, "weight": int(is_trained)}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in answer.tool_calls
        ]
    return message


def split_tools(system: str) -> tuple[str, list[dict]]:
    """The system prompt without its tool section, and the specifications that stood in it.

    >>> split_tools('Be brief.\\n\\n# Tools\\n<tools>\\n{"a": 1}\\n</tools>\\n<tool_call>\\n</tool_call>')
    ('Be brief.', [{'a': 1}])
    """
    found = _TOOLS.search(system)
    if found is None:
        return system, []
    lines = found.group(1).splitlines()
    try:
        specs = [msgspec.json.decode(line) for line in lines if line.strip()]
    except msgspec.DecodeError:
        return system, []
    return (system[: found.start()] + system[found.end() :]).strip("\n"), specs
