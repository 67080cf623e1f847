"""A trajectory's tokens back to chat messages, for supervised training elsewhere.

The journal keeps tokens, not messages, so the messages are read off the tokens: turns of the ChatML family
(`<|im_start|>role ... <|im_end|>`, as all Qwen models have them), tool specifications from the system prompt, tool results from user turns, and
answers by the gateway's own parser. What was read is rendered again: a turn that does not come out as it was recorded (a broken tool call, say)
is written as its text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from qwengyre.core.errors import ConfigError
from qwengyre.trajectory.match import Turn, TurnRole

_TOOLS = re.compile(
    r"(?:\n\n)?# Tools\n(?:(?!# Tools\n).)*?<tools>\n(.*?)\n</tools>.*?\n</tool_call>(?:\s*<IMPORTANT>.*?</IMPORTANT>)?",
    re.DOTALL,
)
_HEADER_TOKENS = 24
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_REASONING = re.compile(r"<think>.*?</think>\n\n", re.DOTALL)


class Chatml(msgspec.Struct, frozen=True):
    """How to read and write one tokenizer's turns."""

    start: int
    end: int
    decode: Callable[[list[int]], str]
    parse: Callable[[list[int], list[dict[str, Any]]], Turn]
    """An answer's tokens and the tools that were offered, to its turn."""
    render: Callable[[Sequence[Turn], list[dict[str, Any]]], list[int]]
    """Turns and tools to tokens. Raises ValueError for what the template refuses."""


class ChatRow(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    """OpenAI form; an assistant message has `weight` 1 if any of its tokens is trained, else 0."""
    tools: list[dict[str, Any]]
    renders_back: bool
    """The run's renderer makes the recorded text of the messages and tools."""


class _Recorded(msgspec.Struct, frozen=True):
    """One turn as it was recorded."""

    ids: list[int]
    """Without the markers of its beginning and its end."""
    text: str
    is_trained: bool


class _Read(msgspec.Struct, frozen=True):
    """What the recorded turns say: a list of turns for each, for one may hold several tool results."""

    turns: list[list[Turn]]
    tools: list[dict[str, Any]]


def chat_row(token_ids_T: np.ndarray, trainable_T: np.ndarray, chatml: Chatml) -> ChatRow:
    """Read the turns of one path. Raises ConfigError when it has none: the tokenizer is another one, or no ChatML."""
    recorded = list(_recorded(token_ids_T, trainable_T, chatml))
    if not recorded:
        raise ConfigError("the tokens hold no <|im_start|>: give the run's own tokenizer, or export Parquet", key="--tokenizer")
    read, renders_back = _read_back(recorded, chatml)
    messages: list[dict[str, Any]] = []
    for one, turns in zip(recorded, read.turns, strict=True):
        messages += (_message(turn, one.is_trained) for turn in turns)
    _pair_tool_calls(messages)
    return ChatRow(messages, read.tools, renders_back)


def _recorded(token_ids_T: np.ndarray, trainable_T: np.ndarray, chatml: Chatml) -> Iterator[_Recorded]:
    for start, stop in _bounds(token_ids_T, chatml):
        ids = _body(token_ids_T[start:stop], chatml)
        yield _Recorded(ids, chatml.decode(ids), bool(trainable_T[start:stop].any()))


def _bounds(token_ids_T: np.ndarray, chatml: Chatml) -> Iterator[tuple[int, int]]:
    """Of the turns, without the markers of their beginnings."""
    starts = np.flatnonzero(token_ids_T == chatml.start).tolist()
    return ((start + 1, stop) for start, stop in itertools.pairwise((*starts, len(token_ids_T))))


def _body(token_ids_T: np.ndarray, chatml: Chatml) -> list[int]:
    ids: list[int] = token_ids_T.tolist()
    return ids[: ids.index(chatml.end)] if chatml.end in ids else ids


def _read_back(recorded: Sequence[_Recorded], chatml: Chatml) -> tuple[_Read, bool]:
    """The turns, those as text that do not render back as what they say; all as what they say if text does not render back either."""
    first = read = _read(recorded, frozenset(), chatml)
    as_text: frozenset[int] = frozenset()
    while changed := _changed(recorded, read, chatml):
        if changed <= as_text:
            return first, False
        as_text |= changed
        read = _read(recorded, as_text, chatml)
    return read, True


def _changed(recorded: Sequence[_Recorded], read: _Read, chatml: Chatml) -> frozenset[int]:
    """Which of the recorded turns come out otherwise when they are rendered; all of them if their number does."""
    everything = frozenset(range(len(recorded)))
    try:
        rendered_T = np.asarray(chatml.render(list(itertools.chain(*read.turns)), read.tools))
    except ValueError:
        return everything
    texts = [chatml.decode(_body(rendered_T[start:stop], chatml)) for start, stop in _bounds(rendered_T, chatml)]
    if len(texts) != len(recorded):
        return everything
    return frozenset(at for at, (one, text) in enumerate(zip(recorded, texts, strict=True)) if one.text != text)


def _read(recorded: Sequence[_Recorded], as_text: frozenset[int], chatml: Chatml) -> _Read:
    turns: list[list[Turn]] = []
    tools: list[dict[str, Any]] = []
    for at, one in enumerate(recorded):
        role, _, text = one.text.partition("\n")
        role = role.strip()
        if role == "assistant":
            turns.append([_answer(one, chatml, tools, is_text=at in as_text)])
        elif role == "user" and text.lstrip().startswith("<tool_response>") and at not in as_text:
            turns.append([Turn(role="tool", text=result) for result in _TOOL_RESPONSE.findall(text)])
        else:
            if role == "system" and at not in as_text:
                text, specs = split_tools(text)
                tools += specs
            turns.append([Turn(role=cast(TurnRole, role), text=text)] if text or role != "system" else [])
    return _Read(turns, tools)


def _answer(one: _Recorded, chatml: Chatml, tools: list[dict[str, Any]], *, is_text: bool) -> Turn:
    ids = one.ids
    header = next(
        (index for index in range(1, min(_HEADER_TOKENS, len(ids))) if chatml.decode(ids[:index]).endswith("\n")), len(ids)
    )
    turn = chatml.parse(ids[header:], tools)
    if not (is_text or any(not _is_object(use.arguments) for use in turn.tool_uses)):
        return turn
    return Turn(role="assistant", text=_REASONING.sub("", chatml.decode(ids[header:]), count=1), reasoning=turn.reasoning)


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def _message(turn: Turn, is_trained: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.role == "assistant":
        message["weight"] = int(is_trained)
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_uses:
        message["tool_calls"] = [
            {"id": "", "type": "function", "function": {"name": use.name, "arguments": use.arguments}} for use in turn.tool_uses
        ]
    return message


def _pair_tool_calls(messages: Sequence[dict[str, Any]]) -> None:
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


def split_tools(system: str) -> tuple[str, list[dict[str, Any]]]:
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
    before, after = system[: found.start()], system[found.end() :]
    return (before + after if before else after.removeprefix("\n\n")), specs
