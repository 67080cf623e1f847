"""Tokens as people read them: messages of a context, and an answer as reasoning, text and tool calls. Legend: `T` tokens.

A journal keeps tokens, not messages. Answers are read by the run's own renderer, as the gateway read them for the harness. Contexts
are cut at the markers of the ChatML family, which all Qwen models have; a context without them is one message, shown as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

START, END = "<|im_start|>", "<|im_end|>"
_TOOL_RESPONSE: Final = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_TOOLS: Final = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_EMPTY_REASONING: Final = re.compile(r"^\s*<think>\s*(</think>\s*)?$")

Decode = Callable[[Sequence[int]], str]


class SaidCall(msgspec.Struct, frozen=True):
    """A tool call as the policy wrote it."""

    name: str
    arguments: str
    """Pretty where it is JSON."""
    is_valid: bool


class ShownAnswer(msgspec.Struct, frozen=True):
    text: str
    reasoning: str = ""
    tool_calls: tuple[SaidCall, ...] = ()


class ShownMessage(msgspec.Struct, frozen=True):
    """One message of a context."""

    actor: str
    """`system`, `user`, `assistant`, `tool`; `context` where no marker tells."""
    text: str
    num_tools: int = 0
    """Tool specifications in it."""

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


ReadAnswer = Callable[[Sequence[int], Sequence[int]], ShownAnswer]
"""(tokens of the answer, last tokens of its prompt) to what it says."""


def messages_of(text: str) -> list[ShownMessage]:
    """The messages of a stretch of context. What precedes the first marker ended the message before, unless there is no marker at all.

    >>> [(m.actor, m.text) for m in messages_of("<|im_end|>\\n<|im_start|>user\\nhello<|im_end|>\\n<|im_start|>assistant\\n")]
    [('user', 'hello')]
    >>> [(m.actor, m.text) for m in messages_of("[INST] hello [/INST]")]
    [('context', '[INST] hello [/INST]')]
    """
    before, *parts = text.split(START)
    shown = []
    if before.replace(END, "").strip():
        shown.append(ShownMessage("context", before.replace(END, "").strip("\n")))
    for part in parts:
        shown += _messages(part)
    return shown


def _messages(part: str) -> Iterator[ShownMessage]:
    actor, _, body = part.partition("\n")
    body = body.partition(END)[0].strip("\n")
    actor = actor.strip() or "context"
    if actor == "assistant" and (not body or _EMPTY_REASONING.match(body)):
        return  # the beginning of the answer that follows
    results = _TOOL_RESPONSE.findall(body) if actor in ("user", "tool") else []
    if results:
        yield from (ShownMessage("tool", result) for result in results)
        rest = _TOOL_RESPONSE.sub("", body).strip()
        if rest:
            yield ShownMessage(actor, rest)
        return
    tools = _TOOLS.search(body)
    yield ShownMessage(actor, body, num_tools=len(tools[1].splitlines()) if tools else 0)


def plain_answer(decode: Decode) -> ReadAnswer:
    """For a run whose renderer is not known: all of it as text."""

    def read(ids: Sequence[int], tail: Sequence[int]) -> ShownAnswer:
        return ShownAnswer(decode(ids).replace(END, "").strip())

    return read


def pretty(arguments: str) -> str:
    """JSON with one key a line; anything else as it is.

    >>> pretty('{"path": "a.py"}')
    '{\\n  "path": "a.py"\\n}'
    """
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except ValueError:
        return arguments


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds. A character that several tokens make stands with the last of them.

    >>> token_texts([0, 1], lambda ids: "".join("ab"[i] for i in ids))
    ['a', 'b']
    """
    texts: list[str] = []
    first, waiting = 0, 0
    for stop in range(1, len(ids) + 1):
        text = decode(ids[first:stop])
        if text.endswith("�") and stop - first < MAX_TOKENS_OF_A_CHARACTER and stop < len(ids):
            waiting += 1
            continue
        texts += [""] * waiting + [text]
        first, waiting = stop, 0
    return texts


MAX_TOKENS_OF_A_CHARACTER: Final = 8
"""A character has four bytes at most, and a token at least one; some join to more."""
