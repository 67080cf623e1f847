"""The table of dialects: which path speaks which, and how errors look in it."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import msgspec

from qwengyre.gateway.protocol import chat, messages, responses

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


class Dialect(msgspec.Struct, frozen=True):
    name: str
    module: ModuleType
    """`parse`, `Stream`, `body`, `error` of `gateway.protocol`."""
    path: str
    """Behind the base URL."""

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        payload = self.module.error(message, kind=KINDS.get(status, "api_error"), code=code, param=param)
        return msgspec.json.encode(payload)


DIALECTS: Final = (
    Dialect(name="chat", module=chat, path="chat/completions"),
    Dialect(name="messages", module=messages, path="messages"),
    Dialect(name="responses", module=responses, path="responses"),
)
BY_PATH: Final[dict[str, Dialect]] = {dialect.path: dialect for dialect in DIALECTS}
DEFAULT: Final = DIALECTS[0]
COUNT_TOKENS: Final = "messages/count_tokens"
