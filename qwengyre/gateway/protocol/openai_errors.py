"""Errors as both dialects of OpenAI have them."""

from __future__ import annotations

from qwengyre.gateway.protocol import sse
from qwengyre.gateway.protocol.fields import Json


def openai_error(message: str, *, kind: str, code: str | None = None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_overflow(num_tokens: int, max_tokens: int, *, param: str) -> bytes:
    """The sentences that OpenAI, vLLM and Anthropic have used: clients look for one of them, for the code, or for both."""
    message = (
        f"This model's maximum context length is {max_tokens} tokens. However, your messages resulted in {num_tokens} tokens "
        f"(prompt is too long: {num_tokens} tokens > {max_tokens} maximum; your input exceeds the context window of this model). "
        "Please reduce the length of the messages."
    )
    return sse.encode(openai_error(message, kind="invalid_request_error", code="context_length_exceeded", param=param))
