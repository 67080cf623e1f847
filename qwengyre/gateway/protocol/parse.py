"""Parsers that know little of a format: they ask `parse_response`. `channels` and `framed` follow a format token by token."""

from __future__ import annotations

from collections.abc import Sequence

from qwengyre.gateway.protocol.answer import AnswerStart, Parsed, ParseWhole, say_rest, say_whole
from qwengyre.gateway.protocol.deltas import Delta
from qwengyre.gateway.protocol.said import NewToolId, Said
from qwengyre.gateway.protocol.text import Detokenizer, Trimmed


class BracedParser:
    """A format whose call is the whole answer, one JSON object, with nothing around it (Llama 3): what begins with a brace is read at
    its end, anything else is text."""

    def __init__(self, start: AnswerStart, stops: frozenset[int], headers: frozenset[int]):
        """`headers` are tokens of a turn's beginning: an answer that has one is left to `parse_response`."""
        self._start, self._stops, self._headers = start, stops, headers
        self._said = Said(start.new_tool_id, text=Trimmed(), reasoning=Trimmed())
        self._detokenizer = Detokenizer(start.decode)
        self._ids: list[int] = []
        self._lead = ""
        self._is_text = self._is_whole = self._has_ended = False

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        for token in token_ids:
            if self._has_ended:
                break
            self._ids.append(token)
            if token in self._stops:
                self._end()
            elif token in self._headers:
                self._is_whole = True
            elif not self._is_whole:
                self._text(self._detokenizer.push((token,)))
        return self._said.take()

    def finish(self) -> list[Delta]:
        if not self._has_ended:
            self._end()
        return self._said.take()

    @property
    def cut_off(self) -> str:
        return self._said.cut_off

    def _text(self, text: str) -> None:
        if self._is_text:
            self._said.say(text)
            return
        self._lead += text
        begun = self._lead.lstrip()
        self._is_whole = begun.startswith("{")
        if begun and not self._is_whole:
            self._is_text = True
            self._said.say(self._lead)

    def _end(self) -> None:
        self._has_ended = True
        if self._is_whole:
            say_whole(self._said, self._start.parse_whole(self._ids), str)
        else:
            self._text(self._detokenizer.flush())


class WholeParser:
    """Streams for any renderer, with nothing but its `parse_response`: what is there is parsed again when it has grown by a tenth."""

    HOLD_BACK = 32
    """Characters at the end that may still turn out to be a marker."""

    def __init__(self, parse_whole: ParseWhole, new_tool_id: NewToolId):
        self._parse_whole = parse_whole
        self._said = Said(new_tool_id, text=Trimmed(""), reasoning=Trimmed(""))
        self._ids: list[int] = []
        self._next = 16

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        self._ids += token_ids
        if len(self._ids) < self._next:
            return []
        self._next = max(len(self._ids) + 8, len(self._ids) * 11 // 10)
        parsed = self._parse_whole(self._ids)
        if parsed.blocks:
            return []
        reasoning = parsed.reasoning if not parsed.is_reasoning_open else parsed.reasoning[: -self.HOLD_BACK]
        text = "" if parsed.is_reasoning_open else parsed.text[: -self.HOLD_BACK].rstrip()
        say_rest(self._said, Parsed(text=text, reasoning=reasoning.rstrip(), is_reasoning_open=False, blocks=()))
        return self._said.take()

    def finish(self) -> list[Delta]:
        say_whole(self._said, self._parse_whole(self._ids), str)
        return self._said.take()

    @property
    def cut_off(self) -> str:
        return self._said.cut_off
