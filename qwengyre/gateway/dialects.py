"""The dialects that harnesses may speak, by path."""

from __future__ import annotations

from typing import Final

from qwengyre.gateway.protocol.chat import ChatDialect
from qwengyre.gateway.protocol.dialect import Dialect, Place
from qwengyre.gateway.protocol.gemini import GeminiDialect
from qwengyre.gateway.protocol.messages import MessagesDialect
from qwengyre.gateway.protocol.responses import ResponsesDialect

DIALECTS: Final[tuple[Dialect, ...]] = (ChatDialect(), MessagesDialect(), ResponsesDialect(), GeminiDialect())
BY_NAME: Final = {dialect.name: dialect for dialect in DIALECTS}
SIGNS: Final = {"anthropic-version": "messages", "x-goog-api-key": "gemini"}
"""Headers that only clients of one dialect send."""


def place_of(path: str, query: str) -> Place | None:
    """What a path, after its version, asks for; None: nothing that is served."""
    return next((place for dialect in DIALECTS if (place := dialect.place(path, query))), None)


def dialect_of(headers: dict[str, str]) -> Dialect:
    """The dialect to answer in on a path that says nothing."""
    return BY_NAME[next((name for header, name in SIGNS.items() if header in headers), "chat")]
