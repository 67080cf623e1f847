"""Answers that are messages in frames of control tokens, each with its own channel: gpt-oss (harmony) and Inkling."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from qwengyre.gateway.protocol.answer import AnswerStart
from qwengyre.gateway.protocol.deltas import Delta
from qwengyre.gateway.protocol.said import Said, json_text, value_of
from qwengyre.gateway.protocol.text import Detokenizer, Trimmed
from qwengyre.gateway.protocol.tool_block import JSON_WHITE, CallForm, JsonCall, RawArguments, broken

_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_FUNCTIONS: Final = "functions."


class FrameParser:
    """Runs of text between control tokens. What neither `_text` nor `_control` takes is not shown."""

    def __init__(self, special: frozenset[int], stops: frozenset[int], start: AnswerStart, trim: Callable[[], Trimmed]):
        self._special, self._stops, self._start = special | stops, stops, start
        self._said = Said(start.new_tool_id, text=trim(), reasoning=Trimmed())
        self._detokenizer = Detokenizer(start.decode)
        self._has_ended = False

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        run: list[int] = []
        for token in token_ids:
            if self._has_ended:
                break
            if token not in self._special:
                run.append(token)
                continue
            self._text(self._detokenizer.push(run) + self._detokenizer.flush())
            run = []
            if token in self._stops:
                self._has_ended = True
            self._control(token)
        if run:
            self._text(self._detokenizer.push(run))
        return self._said.take()

    def finish(self) -> list[Delta]:
        if not self._has_ended:
            self._text(self._detokenizer.flush())
            self._has_ended = True
            self._end()
        return self._said.take()

    @property
    def cut_off(self) -> str:
        return self._said.cut_off

    def _text(self, text: str) -> None:
        raise NotImplementedError

    def _control(self, token: int) -> None:
        """A control token; one of `stops` ends the answer."""
        raise NotImplementedError

    def _end(self) -> None:
        """The answer was cut."""
        raise NotImplementedError


class HarmonyTokens(msgspec.Struct, frozen=True):
    start: int
    channel: int
    message: int
    end: int
    call: int
    return_: int


class HarmonyParser(FrameParser):
    """`<|start|>role to=functions.NAME<|channel|>NAME<|message|>TEXT<|end|>`, where the prompt has begun the first message."""

    def __init__(self, tokens: HarmonyTokens, start: AnswerStart, prompt_tail: Sequence[int]):
        frame = frozenset((tokens.start, tokens.channel, tokens.message, tokens.end, tokens.call))
        super().__init__(frame, frozenset((tokens.return_,)), start, Trimmed)
        self._tokens = tokens
        self._opening = _last_message(tokens, prompt_tail)
        self._is_first = True
        self._header: list[str] | None = None
        """Of the message that begins: the text before and after each control token."""
        self._say: Callable[[str], None] = _nothing
        self._arguments: RawArguments | None = None

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        if self._is_first and token_ids:
            self._is_first = False
            self._begin(token_ids[0])
        return super().feed(token_ids)

    def _begin(self, first: int) -> None:
        if first == self._tokens.start:
            return
        if self._opening is None:
            self._say = self._said.say
            self._stops |= {self._tokens.call}
            self._special = self._stops
            return
        opening, self._opening = self._opening, None
        for token in opening:
            if token in self._special:
                self._control(token)
            else:
                self._text(self._start.decode([token]))

    def _text(self, text: str) -> None:
        if self._header is not None:
            self._header[-1] += text
        elif text:
            self._say(text)

    def _control(self, token: int) -> None:
        tokens = self._tokens
        if token in self._stops:
            self._close(is_closed=False)
        elif self._header is not None:
            self._in_header(token, self._header)
        elif token == tokens.start:
            self._close(is_closed=False)
            self._header = [""]
        elif token in (tokens.end, tokens.call):
            self._close(is_closed=True)
        else:
            self._say(self._start.decode([token]))

    def _in_header(self, token: int, header: list[str]) -> None:
        if token == self._tokens.message:
            self._header = None
            self._open(header)
        elif token == self._tokens.channel and len(header) == 1:
            header.append("")
        else:
            header[-1] += self._start.decode([token])

    def _open(self, header: list[str]) -> None:
        recipient = _RECIPIENT.search("<".join(header))
        words = header[1].split() if len(header) > 1 else []
        if recipient and recipient.group(1).startswith(_FUNCTIONS):
            self._open_call(recipient.group(1).removeprefix(_FUNCTIONS))
        elif words[:1] == ["analysis"]:
            self._say = self._said.think
        elif words[:1] in (["final"], ["commentary"]):
            self._say = self._said.say

    def _open_call(self, name: str) -> None:
        if not name:
            self._say = self._said.say
            return
        self._said.call(name)
        self._arguments = RawArguments(self._said, JSON_WHITE)
        self._say = self._arguments.push

    def _close(self, *, is_closed: bool) -> None:
        arguments, self._arguments, self._say = self._arguments, None, _nothing
        if arguments is not None:
            arguments.close(is_closed=is_closed)

    def _end(self) -> None:
        self._close(is_closed=False)


def _nothing(text: str) -> None:
    """Between messages nothing is said."""


def _last_message(tokens: HarmonyTokens, prompt_tail: Sequence[int]) -> list[int] | None:
    """The header that the prompt has begun an answer with, its last token included; None when the prompt does not end in one."""
    tail = list(prompt_tail)
    if tokens.start not in tail:
        return None
    tail = tail[len(tail) - 1 - tail[::-1].index(tokens.start) :]
    return tail[: tail.index(tokens.message) + 1] if tokens.message in tail else None


class InklingTokens(msgspec.Struct, frozen=True):
    model: int
    text: int
    thinking: int
    invoke: int
    invoke_text: int
    end: int


INKLING_CALL: Final = CallForm("args", white=JSON_WHITE)


class InklingParser(FrameParser):
    """Segments that end with a token of their own, each with a token that says what it is; a call's name stands before it."""

    def __init__(self, tokens: InklingTokens, stops: frozenset[int], start: AnswerStart):
        special = frozenset((tokens.model, tokens.text, tokens.thinking, tokens.invoke, tokens.invoke_text, tokens.end))
        super().__init__(special, stops, start, lambda: Trimmed(""))
        self._tokens = tokens
        self._head = ""
        """What a segment says before it is known what it is."""
        self._num_read = 0
        """Tokens or texts of the segment, but for the token that a segment may begin with."""
        self._has_model = False
        self._say: Callable[[str], None] | None = self._said.think if start.is_reasoning else None
        self._call: JsonCall | None = None
        self._name = ""

    def _text(self, text: str) -> None:
        if not text:
            return
        self._num_read += 1
        if self._say is None:
            self._head += text
        else:
            self._say(text)

    def _control(self, token: int) -> None:
        tokens, is_new, is_open = self._tokens, self._num_read == 0, self._say is None
        is_thinking = self._say == self._said.think
        if token in self._stops or token == tokens.end:
            self._close(is_closed=token == tokens.end)
        elif is_new and token == tokens.model and not self._has_model:
            self._has_model = True
        elif is_new and token == tokens.thinking:
            self._begin(self._said.think)
        elif is_new and token == tokens.text and is_open:
            self._begin(self._said.say)
        elif (is_open and token in (tokens.invoke, tokens.invoke_text)) or (token == tokens.invoke and is_thinking):
            self._open_call()
        else:
            self._text(self._start.decode([token]))

    def _begin(self, say: Callable[[str], None]) -> None:
        self._num_read, self._say = 1, say

    def _open_call(self) -> None:
        self._name, self._head = self._head.strip(), ""
        self._call = JsonCall(self._said, INKLING_CALL)
        self._begin(self._call.text)

    def _close(self, *, is_closed: bool) -> None:
        if self._call is not None:
            self._close_call(self._call, is_closed=is_closed)
        elif self._say is None:
            self._said.say(self._head)
        self._head, self._say, self._call = "", None, None
        self._num_read, self._has_model = 0, False

    def _close_call(self, call: JsonCall, *, is_closed: bool) -> None:
        raw = call.finish(closed=is_closed)
        if raw is None:
            return
        if not self._name:
            self._said.show(raw)
            return
        self._said.call(self._name)
        value = value_of(raw)
        text = json_text(value.get("args", {})) if isinstance(value, dict) else raw
        self._said.arguments(text if is_closed else broken(raw) or "")

    def _end(self) -> None:
        self._close(is_closed=False)
