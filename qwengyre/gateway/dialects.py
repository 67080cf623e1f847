"""The dialects that harnesses may speak, by path."""

from __future__ import annotations

from typing import Final

from qwengyre.gateway.protocol.chat import ChatDialect
from qwengyre.gateway.protocol.dialect import Dialect
from qwengyre.gateway.protocol.messages import MessagesDialect
from qwengyre.gateway.protocol.responses import ResponsesDialect

DIALECTS: Final[tuple[Dialect, ...]] = (ChatDialect(), MessagesDialect(), ResponsesDialect())
BY_NAME: Final = {dialect.name: dialect for dialect in DIALECTS}
BY_PATH: Final = {dialect.path: dialect for dialect in DIALECTS}
BY_COUNT_PATH: Final = {dialect.count_path: dialect for dialect in DIALECTS if dialect.count_path}


def dialect_of(path: str, headers: dict[str, str]) -> Dialect:
    """The dialect to answer in, also on a path that says nothing: only Anthropic's clients name a version in a header."""
    known = BY_PATH.get(path) or BY_COUNT_PATH.get(path)
    return known or BY_NAME["messages" if "anthropic-version" in headers else "chat"]
