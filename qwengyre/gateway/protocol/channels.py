"""Answers with one channel after the other: reasoning, text, tool calls between markers. The parser of most formats.

A format is a table of what a marker does where; what the table lacks is text. Markers are control tokens, or, where a tokenizer has
none for them, text. Where only the end can tell what something was, it is held: a call inside reasoning that nobody closed ends
the reasoning, unless its closing marker comes after all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec

from qwengyre.gateway.protocol.answer import AnswerStart, say_whole
from qwengyre.gateway.protocol.calls import CallReader, IsString
from qwengyre.gateway.protocol.deltas import Delta
from qwengyre.gateway.protocol.said import Said
from qwengyre.gateway.protocol.text import Detokenizer, Marked, Trim, Trimmed


class ChannelMarker(Enum):
    THINK = "reasoning begins"
    THINK_END = "reasoning ends"
    SECTION = "tool calls begin"
    SECTION_END = "tool calls end"
    CALL = "one tool call begins"
    CALL_END = "it ends"
    ODD = "only parse_response knows what this is"
    STOP = "the answer ends"


class Where(Enum):
    START = "start"
    """Nothing but white space yet."""
    REASONING = "reasoning"
    HELD = "held"
    """A call inside reasoning: which of the two it is will be seen."""
    CONTENT = "content"
    CALL = "call"
    BETWEEN = "between"
    """After a tool call: nothing but another one is shown."""
    AFTER = "after"
    """After the last tool call: nothing is shown."""
    UNDECIDED = "undecided"
    """`parse_response` of the whole will tell."""
    ENDED = "ended"


Moves = Mapping[tuple[Where, ChannelMarker], Where]
_REASONING_FIRST: Final[Moves] = {
    (Where.START, ChannelMarker.THINK): Where.REASONING,
    (Where.START, ChannelMarker.SECTION): Where.BETWEEN,
    (Where.REASONING, ChannelMarker.THINK): Where.REASONING,
    (Where.REASONING, ChannelMarker.THINK_END): Where.CONTENT,
    (Where.CONTENT, ChannelMarker.SECTION): Where.BETWEEN,
    (Where.BETWEEN, ChannelMarker.CALL): Where.CALL,
    (Where.BETWEEN, ChannelMarker.SECTION_END): Where.AFTER,
    (Where.CALL, ChannelMarker.CALL_END): Where.BETWEEN,
    (Where.CALL, ChannelMarker.SECTION_END): Where.AFTER,
}
_BARE_CALLS: Final[Moves] = {(Where.START, ChannelMarker.CALL): Where.CALL, (Where.CONTENT, ChannelMarker.CALL): Where.CALL}
IN_SECTIONS: Final[Moves] = _REASONING_FIRST
"""Calls stand in a section: DeepSeek V3."""
HELD_SECTIONS: Final[Moves] = {
    **IN_SECTIONS,
    (Where.REASONING, ChannelMarker.SECTION): Where.HELD,
    (Where.START, ChannelMarker.ODD): Where.UNDECIDED,
    (Where.CONTENT, ChannelMarker.ODD): Where.UNDECIDED,
}
"""A section ends reasoning that nobody closed: Kimi."""
BARE: Final[Moves] = {**_REASONING_FIRST, **_BARE_CALLS}
"""Calls stand by themselves: Laguna, Hy3."""
HELD_BARE: Final[Moves] = {**BARE, (Where.REASONING, ChannelMarker.CALL): Where.HELD}
"""A call ends reasoning that nobody closed: Qwen, Nemotron, MiniMax."""
INTERLEAVED: Final[Moves] = {
    (Where.REASONING, ChannelMarker.THINK): Where.REASONING,
    (Where.REASONING, ChannelMarker.THINK_END): Where.CONTENT,
    (Where.REASONING, ChannelMarker.CALL): Where.CALL,
    (Where.CONTENT, ChannelMarker.THINK): Where.REASONING,
    (Where.CONTENT, ChannelMarker.THINK_END): Where.CONTENT,
    (Where.CONTENT, ChannelMarker.CALL): Where.CALL,
    (Where.CALL, ChannelMarker.CALL_END): Where.CONTENT,
}
"""Reasoning, text and calls in any order: GLM."""
GEMMA: Final[Moves] = {
    (Where.START, ChannelMarker.THINK): Where.REASONING,
    (Where.START, ChannelMarker.CALL): Where.CALL,
    (Where.REASONING, ChannelMarker.THINK_END): Where.CONTENT,
    (Where.REASONING, ChannelMarker.CALL): Where.HELD,
    (Where.CONTENT, ChannelMarker.THINK): Where.UNDECIDED,
    (Where.CONTENT, ChannelMarker.CALL): Where.CALL,
    (Where.CALL, ChannelMarker.CALL_END): Where.CONTENT,
}
"""Reasoning first; text goes on after a call."""
DSML: Final[Moves] = {
    (Where.REASONING, ChannelMarker.THINK): Where.REASONING,
    (Where.REASONING, ChannelMarker.THINK_END): Where.CONTENT,
    (Where.REASONING, ChannelMarker.SECTION): Where.BETWEEN,
    (Where.CONTENT, ChannelMarker.THINK): Where.REASONING,
    (Where.CONTENT, ChannelMarker.THINK_END): Where.CONTENT,
    (Where.CONTENT, ChannelMarker.SECTION): Where.BETWEEN,
    (Where.CONTENT, ChannelMarker.CALL): Where.CALL,
    (Where.BETWEEN, ChannelMarker.SECTION): Where.BETWEEN,
    (Where.BETWEEN, ChannelMarker.CALL): Where.CALL,
    (Where.CALL, ChannelMarker.CALL_END): Where.BETWEEN,
    (Where.CALL, ChannelMarker.SECTION_END): Where.BETWEEN,
}
"""As GLM, with sections, and nothing but calls after a call: DeepSeek V4."""


class Channels(msgspec.Struct, frozen=True, kw_only=True):
    """One format, for one tokenizer."""

    moves: Moves
    tokens: dict[int, ChannelMarker]
    """Control tokens."""
    texts: dict[str, ChannelMarker] = {}
    """The same as text."""
    first: Where = Where.START
    """Where an answer begins that does not begin in reasoning."""
    inner: frozenset[int] = frozenset()
    """Control tokens that mean something inside a call."""
    header: tuple[int, ...] = ()
    """What an answer's turn begins with: an answer that repeats it is left to `parse_response`."""
    close_text: str = ""
    """What ends reasoning wherever it is spelled out, once a control token has ended it, too."""
    new_call: Callable[[Said, IsString], CallReader]
    opener: str
    closer: str
    """What a call that cannot be told is shown between."""
    think_prefix: str = ""
    """What reasoning begins with, if it is a word of the format; the reasoning must then begin with the answer's first token."""
    new_trim: Callable[[], Trim] = Trimmed
    """What does not count at the ends of the text."""


class ChannelParser:
    """Follows `Channels` token by token."""

    _call: CallReader
    """While `_where` is CALL."""

    def __init__(self, channels: Channels, special: frozenset[int], start: AnswerStart):
        """`special` are all control tokens that `channels` names."""
        self._channels, self._start = channels, start
        self._where = Where.REASONING if start.is_reasoning else channels.first
        self._said = Said(start.new_tool_id, text=channels.new_trim(), reasoning=Trimmed())
        self._detokenizer = Detokenizer(start.decode)
        self._marked = Marked(tuple(channels.texts)) if channels.texts else None
        self._special = special
        self._ids: list[int] = []
        self._beginning: list[int] | None = []
        """Tokens that may still be the header; None once that is known."""
        self._lead = ""
        self._held: list[tuple[ChannelMarker | None, int, str]] = []
        self._tail = ""
        self._prefix: str | None = None
        """What may be the word that reasoning begins with."""

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        if self._beginning is not None:
            token_ids = self._past_header(self._beginning, token_ids)
        self._read(token_ids)
        return self._said.take()

    def finish(self) -> list[Delta]:
        if self._beginning:
            self._read(self._beginning)
        if self._where is not Where.ENDED:
            self._end()
        return self._said.take()

    @property
    def cut_off(self) -> str:
        return self._said.cut_off

    # --- what comes in ---------------------------------------------------------------------------------------------------

    def _past_header(self, beginning: list[int], token_ids: Sequence[int]) -> Sequence[int]:
        """What can be read now: nothing while the answer may be repeating the header."""
        header, begun = self._channels.header, [*beginning, *token_ids]
        if begun and len(begun) < len(header) and header[: len(begun)] == tuple(begun):
            self._beginning = begun
            return ()
        if begun:
            self._beginning = None
            if header and tuple(begun[: len(header)]) == header:
                self._where = Where.UNDECIDED
        return begun

    def _read(self, token_ids: Sequence[int]) -> None:
        run: list[int] = []
        for token in token_ids:
            if self._where is Where.ENDED:
                return
            self._ids.append(token)
            if token in self._special:
                if run:
                    self._text(self._detokenizer.push(run))
                    run = []
                self._control(token)
            else:
                run.append(token)
        if run:
            self._text(self._detokenizer.push(run))

    def _control(self, token: int) -> None:
        self._flush()
        marker = self._channels.tokens.get(token)
        if marker is ChannelMarker.STOP:
            self._end()
        else:
            self._terminal(marker, token, self._start.decode([token]))

    def _flush(self) -> None:
        self._text(self._detokenizer.flush())
        if self._marked is not None:
            self._literal(self._marked.flush())

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._marked is None:
            self._literal(text)
            return
        for before, marker in self._marked.push(text):
            self._literal(before)
            if marker:
                self._terminal(self._channels.texts[marker], -1, marker)

    # --- what it means ---------------------------------------------------------------------------------------------------

    def _literal(self, text: str) -> None:
        """Text, where it stands."""
        if not text:
            return
        match self._where:
            case Where.CONTENT:  # what an answer is most of comes first
                self._said.say(text)
            case Where.REASONING:
                self._think(text)
            case Where.CALL:
                self._call.text(text)
            case Where.START:
                self._lead += text
                if text.strip() or self._channels.think_prefix:
                    self._begin_content()
            case Where.HELD:
                self._held.append((None, -1, text))

    def _terminal(self, marker: ChannelMarker | None, token: int, text: str) -> None:
        if self._where is Where.HELD:
            self._in_held(marker, token, text)
            return
        target = self._channels.moves.get((self._where, marker)) if marker is not None else None
        is_inside = self._where is Where.CALL and marker is ChannelMarker.CALL_END and not self._call.may_end
        if target is None or is_inside:
            if self._where is Where.CALL:
                self._call.mark(token, text)
            else:
                self._literal(text)
            return
        if target is Where.HELD:
            self._held = [(marker, token, text)]
        self._leave(target, is_closed=marker is ChannelMarker.CALL_END)
        self._where = target
        if marker is ChannelMarker.THINK:
            self._prefix = "" if self._channels.think_prefix else None
        if target is Where.CALL:
            self._call = self._channels.new_call(self._said, self._start.is_string)

    def _leave(self, target: Where, *, is_closed: bool) -> None:
        if self._where is Where.CALL:
            self._close_call(is_closed=is_closed)
        elif self._where is Where.REASONING:
            self._release_prefix()
        elif self._where is Where.START and target is not Where.REASONING:
            self._said.say(self._lead)

    def _begin_content(self) -> None:
        self._where = Where.CONTENT
        lead, self._lead = self._lead, ""
        self._said.say(lead)

    def _think(self, text: str) -> None:
        if self._prefix is not None:
            self._prefix, text = self._prefix + text, ""
            if len(self._prefix) >= len(self._channels.think_prefix):
                self._release_prefix()
            return
        self._said.think(text)
        close = self._channels.close_text
        if close:
            self._tail = (self._tail + text)[-(len(text) + len(close)) :]
            if close in self._tail:
                self._where = Where.UNDECIDED

    def _release_prefix(self) -> None:
        prefix, self._prefix = self._prefix, None
        if prefix:
            self._think(prefix.removeprefix(self._channels.think_prefix))

    def _in_held(self, marker: ChannelMarker | None, token: int, text: str) -> None:
        if marker is not ChannelMarker.THINK_END:
            self._held.append((marker, token, text))
            return
        held, self._held = self._held, []
        self._where = Where.REASONING
        for inner, _, piece in held:
            is_dropped = (Where.REASONING, inner) in self._channels.moves and inner is ChannelMarker.THINK
            if self._where is Where.REASONING and not is_dropped:
                self._think(piece)
        if self._where is Where.REASONING:
            self._where = Where.CONTENT

    def _close_call(self, *, is_closed: bool) -> None:
        raw = self._call.finish(closed=is_closed)
        if raw is not None:
            channels = self._channels
            self._said.show(f"{channels.opener}\n{raw.strip()}" + (f"\n{channels.closer}" if is_closed else ""))

    # --- the end ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._flush()
        if self._where is Where.HELD:
            held, self._held = self._held, []
            self._where = Where.CONTENT
            for marker, token, text in held:
                if marker is None and token < 0:
                    self._literal(text)
                else:
                    self._terminal(marker, token, text)
        if self._where is Where.CALL:
            self._close_call(is_closed=False)
        elif self._where is Where.REASONING:
            self._release_prefix()
        elif self._where is Where.START:
            self._said.say(self._lead)
        elif self._where is Where.UNDECIDED:
            say_whole(self._said, self._start.parse_whole(self._ids), self._show)
        self._where = Where.ENDED

    def _show(self, raw: str) -> str:
        return f"{self._channels.opener}\n{raw.strip()}"
