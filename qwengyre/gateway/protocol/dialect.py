"""What a dialect is: the single place where a wire format lives. One module per dialect implements it.

To add one: subclass `Dialect`, list its fields, add it to `gateway.dialects.DIALECTS`, and its table appears in docs/gateway.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Protocol

import msgspec

from qwengyre.gateway.protocol.deltas import AnswerSoFar, Delta, Ending
from qwengyre.gateway.protocol.fields import Field
from qwengyre.gateway.protocol.request import ItemCache, ModelRequest

KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class AnswerHead(msgspec.Struct, frozen=True):
    """What is known of an answer before its first token."""

    id: str
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int


class AnswerStream(Protocol):
    """Deltas to server-sent events; one object per answer and reader."""

    def start(self) -> bytes: ...
    def deltas(self, deltas: Sequence[Delta]) -> bytes: ...
    def keep_alive(self) -> bytes:
        """A sign of life that says nothing."""
        ...

    def end(self, ending: Ending) -> bytes: ...
    def fail(self, message: str) -> bytes:
        """The end of an answer that cannot be finished."""
        ...


class Place(msgspec.Struct, frozen=True):
    """What a path asks for."""

    dialect: Dialect
    is_count: bool = False
    """How long the prompt is, and no answer."""
    model: str | None = None
    stream: bool | None = None
    """None: the body says it, as with `model`."""
    wrong: str = ""
    """Why it cannot be served as it is asked for."""

    def told(self, request: ModelRequest) -> ModelRequest:
        """The request with what its path says."""
        if self.model is None:
            return request
        return msgspec.structs.replace(request, model=self.model, stream=bool(self.stream))


class Dialect(ABC):
    name: ClassVar[str]
    version: ClassVar[str] = "v1"
    """What its paths begin with."""
    path: ClassVar[str]
    """After the base URL."""
    count_path: ClassVar[str]
    """Where prompts are counted; empty: nowhere."""
    has_blocks: ClassVar[bool]
    """Texts of an answer come back parted as they were: a call between them makes two. Else they come back as one."""
    tool_id_prefix: ClassVar[str]
    """What clients expect an id of a tool call to begin with."""
    fields: ClassVar[Mapping[str, Field]]
    """Of a body."""
    parts: ClassVar[Mapping[str, Mapping[str, Field]]]
    """Of what the body holds, by place: messages or items, content, tools."""

    def place(self, path: str, query: str) -> Place | None:
        """What a path, after its version, asks of this dialect; None: nothing."""
        if path == self.path:
            return Place(self)
        return Place(self, is_count=True) if self.count_path and path == self.count_path else None

    @abstractmethod
    def parse(self, body: bytes, cache: ItemCache) -> ModelRequest:
        """Read a request body. Raises InvalidRequest."""

    @abstractmethod
    def stream(self, request: ModelRequest, head: AnswerHead) -> AnswerStream: ...

    @abstractmethod
    def whole(self, request: ModelRequest, head: AnswerHead, said: AnswerSoFar, ending: Ending) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def count(self, num_tokens: int) -> bytes:
        """The body that says how long a prompt is."""

    @abstractmethod
    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        """The body of an error."""

    @abstractmethod
    def overflow(self, num_tokens: int, max_tokens: int) -> bytes:
        """The body of the error (status 400) by which clients know that the context is full, and compact it or stop."""


def kind_of(status: int) -> str:
    """The type of an error in all dialects."""
    return KINDS.get(status, "api_error")
