"""What a parser of answers is given, and what `parse_response` makes of a whole answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from qwengyre.gateway.protocol.calls import IsString
from qwengyre.gateway.protocol.deltas import Delta
from qwengyre.gateway.protocol.said import NewToolId, Said
from qwengyre.gateway.protocol.text import Decode


class Parser(Protocol):
    """Tokens to deltas while they are sampled. Any chunking says the same."""

    def feed(self, token_ids: Sequence[int]) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...

    @property
    def cut_off(self) -> str:
        """After `finish`: what was written of a broken last call, and not told."""


class ParsedBlock(msgspec.Struct, frozen=True):
    """A tool call, or what should have been one, as `parse_response` found it."""

    raw: str
    name: str | None
    arguments: str
    """JSON text."""
    is_valid: bool
    """It can be called: it has a name, and arguments that are JSON."""


class Parsed(msgspec.Struct, frozen=True):
    """`parse_response` of a whole answer."""

    text: str
    reasoning: str
    is_reasoning_open: bool
    blocks: tuple[ParsedBlock, ...]


ParseWhole = Callable[[Sequence[int]], Parsed]


class AnswerStart(msgspec.Struct, frozen=True):
    """What is known of an answer before its first token."""

    decode: Decode
    parse_whole: ParseWhole
    new_tool_id: NewToolId
    is_reasoning: bool
    """The prompt ends inside reasoning."""
    is_string: IsString


def say_whole(said: Said, parsed: Parsed, show: Callable[[str], str]) -> None:
    """Say what has not been said of a whole answer. `show` makes text of a block that cannot be called."""
    say_rest(said, parsed)
    for block in parsed.blocks[said.num_blocks :]:
        if block.is_valid and block.name:
            said.call(block.name)
            said.arguments(block.arguments)
        else:
            said.show(show(block.raw))


def say_rest(said: Said, parsed: Parsed) -> None:
    """What has not been said yet of texts that only grow; of a text that was changed meanwhile nothing more is said."""
    reasoning = parsed.reasoning.strip()
    if reasoning.startswith(said.reasoning):
        said.add_reasoning(reasoning[len(said.reasoning) :])
    if parsed.text.startswith(said.content):
        said.add_content(parsed.text[len(said.content) :])
