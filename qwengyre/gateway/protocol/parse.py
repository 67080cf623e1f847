"""Tokens to deltas while they are sampled. The end result equals `parse_response` of the whole, in any chunking.

`Qwen3Parser` knows the grammar of Qwen3 (reasoning, content, JSON tool calls between atomic markers) and follows it
token by token. Where the grammar can only be decided at the end, it holds back and asks `parse_response`.
`WholeParser` does that for every other renderer: it parses what is there again each time it has grown by a tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import msgspec

from qwengyre.gateway.protocol.deltas import Delta, ReasoningDelta, TextDelta, ToolArguments, ToolStart
from qwengyre.gateway.protocol.text import Decode, Detokenizer, Trimmed
from qwengyre.gateway.protocol.tool_block import ToolBlock, WholeCall, read_block

NewToolId = Callable[[int], str]


class ParsedBlock(msgspec.Struct, frozen=True):
    """A tool block as `parse_response` found it."""

    raw: str
    name: str | None
    arguments: str
    """JSON text; used only where `raw` is not the usual JSON."""
    is_valid: bool


class Parsed(msgspec.Struct, frozen=True):
    """`parse_response` of a whole completion."""

    text: str
    reasoning: str
    is_reasoning_open: bool
    blocks: tuple[ParsedBlock, ...]


ParseWhole = Callable[[Sequence[int]], Parsed]


class Parser(Protocol):
    def feed(self, token_ids: Sequence[int]) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


class Grammar(msgspec.Struct, frozen=True):
    """Atomic markers of the Qwen3 format."""

    think: int
    think_end: int
    tool: int
    tool_end: int
    stops: frozenset[int]
    header: int
    """First token of `<|im_start|>assistant`: a completion that repeats it is left to `parse_response`."""

    @property
    def markers(self) -> frozenset[int]:
        return frozenset((self.think, self.think_end, self.tool, self.tool_end)) | self.stops


class Where(Enum):
    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"
    BETWEEN = "between"
    """Behind a tool call: nothing but another one is shown."""
    UNDECIDED = "undecided"
    """Only the end can tell: hold everything."""
    ENDED = "ended"


class Qwen3Parser:
    def __init__(self, grammar: Grammar, decode: Decode, parse_whole: ParseWhole, new_tool_id: NewToolId, *, prefilled: bool):
        self._grammar, self._markers, self._decode = grammar, grammar.markers, decode
        self._parse_whole, self._new_tool_id = parse_whole, new_tool_id
        self._where = Where.REASONING if prefilled else Where.START
        self._ids: list[int] = []
        self._detokenizer = Detokenizer(decode)
        self._reasoning, self._text = Trimmed(), Trimmed()
        self._said_reasoning = ""
        self._said_text = ""
        self._block: ToolBlock | None = None
        self._num_tools = 0
        self._held_reasoning = ""

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        deltas: list[Delta] = []
        run: list[int] = []
        for token in token_ids:
            if self._where is Where.ENDED:
                break
            if not self._ids and token == self._grammar.header:
                self._where = Where.UNDECIDED
            self._ids.append(token)
            if token in self._markers:
                if run:
                    self._plain(self._detokenizer.push(run), deltas)
                    run = []
                self._marker(token, deltas)
            else:
                run.append(token)
        if run and self._where is not Where.ENDED:
            self._plain(self._detokenizer.push(run), deltas)
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._where is not Where.ENDED:
            self._end(deltas)
        return deltas

    def _plain(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        match self._where:
            case Where.START:
                if text.strip():
                    self._where = Where.CONTENT
                    self._say_text(text, deltas)
            case Where.REASONING:
                self._think(text, deltas)
            case Where.CONTENT:
                self._say_text(text, deltas)
            case Where.TOOL:
                self._push_block(text, deltas)

    def _marker(self, token: int, deltas: list[Delta]) -> None:
        grammar = self._grammar
        self._plain(self._detokenizer.flush(), deltas)
        if token in grammar.stops:
            self._end(deltas)
            return
        match self._where:
            case Where.START if token == grammar.think:
                self._where = Where.REASONING
            case Where.REASONING if token == grammar.think_end:
                self._where = Where.CONTENT
            case Where.REASONING if token == grammar.tool:
                self._where = Where.UNDECIDED
            case Where.REASONING if token == grammar.think:
                pass
            case Where.START | Where.CONTENT if token == grammar.tool:
                self._where, self._block = Where.TOOL, ToolBlock()
            case Where.TOOL if token == grammar.tool_end:
                self._close_block(deltas, closed=True)
                self._where = Where.BETWEEN
            case Where.BETWEEN if token == grammar.tool:
                self._where, self._block = Where.TOOL, ToolBlock()
            case Where.BETWEEN:
                pass
            case _:
                self._plain(self._decode([token]), deltas)

    def _end(self, deltas: list[Delta]) -> None:
        self._plain(self._detokenizer.flush(), deltas)
        if self._where is Where.UNDECIDED:
            self._say_whole(deltas)
        elif self._where is Where.TOOL:
            self._close_block(deltas, closed=False)
        self._where = Where.ENDED

    def _think(self, text: str, deltas: list[Delta]) -> None:
        said = self._reasoning.push(text)
        if said:
            self._said_reasoning += said
            deltas.append(ReasoningDelta(text=said))
        self._held_reasoning = (self._held_reasoning + text)[-64:]
        if "</think>" in self._held_reasoning:  # spelled out in plain tokens: `parse_response` cuts the text there
            self._where = Where.UNDECIDED

    def _say_text(self, text: str, deltas: list[Delta]) -> None:
        said = self._text.push(text)
        if said:
            self._said_text += said
            deltas.append(TextDelta(text=said))

    def _push_block(self, text: str, deltas: list[Delta]) -> None:
        block = self._block
        was_named = block.name is not None
        arguments = block.push(text)
        if block.name is not None and not was_named:
            deltas.append(ToolStart(index=self._num_tools, id=self._new_tool_id(self._num_tools), name=block.name))
        if arguments:
            deltas.append(ToolArguments(index=self._num_tools, text=arguments))

    def _close_block(self, deltas: list[Delta], *, closed: bool) -> None:
        block, self._block = self._block, None
        whole = block.finish()
        if block.name is not None:
            rest = block.rest(whole)
            if rest:
                deltas.append(ToolArguments(index=self._num_tools, text=rest))
            self._num_tools += 1
        else:
            self._say_call(whole, block.body.strip(), deltas, closed=closed)

    def _say_call(self, whole: WholeCall, raw: str, deltas: list[Delta], *, closed: bool) -> None:
        """A call that is known as a whole; what cannot be called is shown as text, so that the harness can object."""
        if whole.name is None or not (whole.is_valid and closed):
            text = f"<tool_call>\n{raw}" + ("\n</tool_call>" if closed else "")
            deltas.append(TextDelta(text=f"\n{text}" if self._said_text else text))
            self._said_text += text
            return
        deltas.append(ToolStart(index=self._num_tools, id=self._new_tool_id(self._num_tools), name=whole.name))
        deltas.append(ToolArguments(index=self._num_tools, text=whole.arguments))
        self._num_tools += 1

    def _say_whole(self, deltas: list[Delta]) -> None:
        parsed = self._parse_whole(self._ids)
        deltas += _remainders(parsed, self._said_reasoning, self._said_text)
        self._said_text = parsed.text
        for block in parsed.blocks:
            whole = read_block(block.raw)
            self._say_call(whole, block.raw, deltas, closed=block.is_valid)


class WholeParser:
    """Streams for any renderer, with nothing but its `parse_response`."""

    HOLD_BACK = 32
    """Characters at the end that may still turn out to be a marker."""

    def __init__(self, parse_whole: ParseWhole, new_tool_id: NewToolId):
        self._parse_whole, self._new_tool_id = parse_whole, new_tool_id
        self._ids: list[int] = []
        self._next = 16
        self._said_reasoning = ""
        self._said_text = ""

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
        return self._say(Parsed(text=text, reasoning=reasoning.rstrip(), is_reasoning_open=False, blocks=()))

    def finish(self) -> list[Delta]:
        parsed = self._parse_whole(self._ids)
        deltas = self._say(parsed)
        num_tools = 0
        for block in parsed.blocks:
            if block.is_valid and block.name:
                deltas.append(ToolStart(index=num_tools, id=self._new_tool_id(num_tools), name=block.name))
                deltas.append(ToolArguments(index=num_tools, text=block.arguments))
                num_tools += 1
            else:
                text = f"\n{block.raw}" if self._said_text else block.raw
                self._said_text += text
                deltas.append(TextDelta(text=text))
        return deltas

    def _say(self, parsed: Parsed) -> list[Delta]:
        deltas = _remainders(parsed, self._said_reasoning, self._said_text)
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self._said_reasoning += delta.text
            elif isinstance(delta, TextDelta):
                self._said_text += delta.text
        return deltas


def _remainders(parsed: Parsed, said_reasoning: str, said_text: str) -> list[Delta]:
    """What has not been said yet of a text that only grows; a text that was changed meanwhile says nothing more."""
    deltas: list[Delta] = []
    reasoning = parsed.reasoning.strip()
    if len(reasoning) > len(said_reasoning) and reasoning.startswith(said_reasoning):
        deltas.append(ReasoningDelta(text=reasoning[len(said_reasoning) :]))
    if len(parsed.text) > len(said_text) and parsed.text.startswith(said_text):
        deltas.append(TextDelta(text=parsed.text[len(said_text) :]))
    return deltas
