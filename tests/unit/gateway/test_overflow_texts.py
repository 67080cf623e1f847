"""A full context is told in the words and with the code that clients of each dialect look for; else they ask again and again."""

from __future__ import annotations

import json
import re

import pytest

from qwengyre.gateway.dialects import BY_NAME

OPENAI = ("chat", "responses")
LOOKED_FOR = {
    "litellm 1.60, openai": (OPENAI, r"This model's maximum context length is"),
    "litellm 1.75 to 1.108, openai": (OPENAI, r"(?i)this model's maximum context length is"),
    "litellm 1.110, any": (tuple(BY_NAME), r"(?i)this model's maximum context length is|prompt is too long"),
    "litellm, anthropic": (("messages",), r"prompt is too long"),
    "Claude Code": (("messages",), r"prompt is too long: (\d+) tokens > (\d+) maximum"),
    "litellm and pydantic-ai, Gemini": (("gemini",), r"(?i)exceeds the maximum number of tokens allowed"),
    "by the code": (OPENAI, r'"code":\s*"context_length_exceeded"'),
    "by the number": (OPENAI, r"maximum context length is (\d+) tokens"),
}


@pytest.mark.parametrize("client", LOOKED_FOR)
def test_overflow_is_known_to(client):
    dialects, pattern = LOOKED_FOR[client]
    for name in dialects:
        assert re.search(pattern, BY_NAME[name].overflow(9001, 8192).decode()), name


@pytest.mark.parametrize("name", BY_NAME)
def test_overflow_says_how_much_is_too_much_as_an_invalid_request(name):
    error = json.loads(BY_NAME[name].overflow(9001, 8192))["error"]
    kind = error["status"] if name == "gemini" else error["type"]
    assert (
        kind.lower() in ("invalid_request_error", "invalid_argument")
        and "9001" in error["message"]
        and "8192" in error["message"]
    )
    assert not re.search(r"\b429\b|rate.?limit", error["message"]), "no client should wait and ask again"
