"""What clients may write into the fields of a request, by dialect, as providers publish them; a test holds this to the gateway's tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

Value = Callable[[random.Random], Any]
Json = Any


def _bool(rnd: random.Random) -> bool:
    return rnd.random() < 0.5


def _of(*values: Json) -> Value:
    return lambda rnd: rnd.choice(values)


def _share(rnd: random.Random) -> float:
    return round(rnd.random(), 3)


def word(rnd: random.Random) -> str:
    return f"w{rnd.randrange(10**6)}"


def _names(rnd: random.Random) -> dict[str, str]:
    return {word(rnd): word(rnd) for _ in range(rnd.randrange(3))}


CACHE: Final = _of({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"})
VALID: Final[dict[str, dict[str, Value]]] = {
    "chat": {
        "model": word,
        "stream_options": _of(None, {"include_usage": True}, {"include_usage": False, "include_obfuscation": False}),
        "n": _of(1, None),
        "functions": _of([], None),
        "function_call": _of("auto", "none", None),
        "response_format": _of({"type": "text"}, None),
        "logit_bias": _of({}, None),
        "logprobs": _of(False, None),
        "top_logprobs": _of(0, None),
        "modalities": _of(["text"], None),
        "audio": _of(None),
        "moderation": _of(None),
        "web_search_options": _of(None),
        "temperature": _of(0, 0.7, 1, 2.0, None),
        "top_p": _share,
        "frequency_penalty": _of(-2.0, 0, 1.5),
        "presence_penalty": _of(-2.0, 0, 1.5),
        "seed": _of(0, 7, -1, 2**40),
        "reasoning_effort": _of("none", "minimal", "low", "medium", "high", "xhigh", None),
        "verbosity": _of("low", "medium", "high"),
        "prediction": _of({"type": "content", "content": "x"}),
        "prompt_cache_key": word,
        "prompt_cache_options": _of({"mode": "auto"}),
        "prompt_cache_retention": _of("in-memory", "24h"),
        "metadata": _names,
        "safety_identifier": word,
        "service_tier": _of("auto", "default", "flex", "priority"),
        "store": _bool,
        "user": word,
    },
    "messages": {
        "model": word,
        "output_config": _of({"effort": "low"}, {"effort": "max"}, {}, None),
        "output_format": _of(None),
        "compaction": _of(None),
        "container": _of(None),
        "mcp_servers": _of([], None),
        "thread": _of(None),
        "thinking": _of({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}),
        "temperature": _share,
        "top_p": _share,
        "top_k": _of(1, 40),
        "context_management": _of({"edits": [{"type": "clear_tool_uses_20250919"}]}),
        "cache_control": CACHE,
        "betas": _of([], ["files-api-2025-04-14"]),
        "billing_policy": word,
        "diagnostics": _names,
        "fallback_credit_token": word,
        "fallbacks": _of([]),
        "inference_geo": _of("us"),
        "metadata": _of({"user_id": "u"}, {}),
        "service_tier": _of("auto", "standard_only"),
        "speed": _of("fast", "standard"),
        "user_profile_id": word,
        "workspace_id": word,
    },
    "responses": {
        "model": word,
        "previous_response_id": _of(None),
        "conversation": _of(None),
        "prompt": _of(None),
        "background": _of(False, None),
        "background_options": _of(None),
        "text": _of({"format": {"type": "text"}}, {"verbosity": "low"}, {}, None),
        "top_logprobs": _of(0, None),
        "moderation": _of(None),
        "temperature": _share,
        "top_p": _share,
        "reasoning": _of({"effort": "high", "summary": "auto"}, {"effort": None}, {}, None),
        "context_management": _of([{"type": "compaction", "compact_threshold": 1000}]),
        "truncation": _of("auto", "disabled"),
        "include": _of([], ["reasoning.encrypted_content", "file_search_call.results"], None),
        "max_tool_calls": _of(1, 10),
        "image": _of({}),
        "stream_options": _of({"include_obfuscation": False}, None),
        "prompt_cache_key": word,
        "prompt_cache_options": _of({}),
        "prompt_cache_retention": _of("24h"),
        "access_programs": _of([]),
        "client_metadata": _names,
        "metadata": _names,
        "safety_identifier": word,
        "service_tier": _of("auto", "default", "flex", "priority"),
        "store": _bool,
        "user": word,
    },
    "gemini": {
        "model": word,
        "cachedContent": _of(None),
        "safetySettings": _of([{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}], []),
        "labels": _names,
        "serviceTier": _of("STANDARD"),
        "store": _bool,
    },
    "generationConfig": {
        "candidateCount": _of(1, None),
        "responseMimeType": _of("text/plain", "", None),
        "responseSchema": _of(None),
        "responseJsonSchema": _of(None),
        "responseFormat": _of(None),
        "responseModalities": _of([], ["TEXT"], None),
        "responseLogprobs": _of(False, None),
        "logprobs": _of(0, None),
        "speechConfig": _of(None),
        "imageConfig": _of(None),
        "translationConfig": _of(None),
        "temperature": _share,
        "topP": _share,
        "topK": _of(1, 40),
        "seed": _of(0, 7),
        "presencePenalty": _share,
        "frequencyPenalty": _share,
        "thinkingConfig": _of({"thinkingBudget": 0}, {"includeThoughts": True, "thinkingLevel": "HIGH"}),
        "audioTimestamp": _bool,
        "mediaResolution": _of("MEDIA_RESOLUTION_LOW"),
        "enableEnhancedCivicAnswers": _bool,
        "modelSelectionConfig": _of({}),
        "routingConfig": _of({}),
    },
}
"""What a field may hold of a request that is served, by dialect; the fields that shape the answer are written by `ask`."""

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
REFUSED: Final[dict[str, dict[str, Value]]] = {
    "chat": {
        "n": _of(2, 128),
        "functions": _of([{"name": "f", "parameters": SCHEMA}]),
        "function_call": _of({"name": "f"}),
        "response_format": _of(
            {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        ),
        "logit_bias": _of({"50256": -100}),
        "logprobs": _of(True),
        "top_logprobs": _of(1, 20),
        "modalities": _of(["text", "audio"]),
        "audio": _of({"voice": "alloy", "format": "mp3"}),
        "moderation": _of({"model": "omni"}),
        "web_search_options": _of({}, {"search_context_size": "low"}),
    },
    "messages": {
        "output_config.format": _of({"type": "json_schema", "schema": SCHEMA}),
        "output_format": _of({"type": "json_schema", "schema": SCHEMA}),
        "compaction": _of({"type": "auto"}),
        "container": _of("container_1", {"id": "container_1"}),
        "mcp_servers": _of([{"type": "url", "url": "https://example.com", "name": "m"}]),
        "thread": _of({"id": "t"}),
    },
    "responses": {
        "previous_response_id": _of("resp_1"),
        "conversation": _of("conv_1", {"id": "conv_1"}),
        "prompt": _of({"id": "pmpt_1"}),
        "background": _of(True),
        "background_options": _of({}),
        "text.format": _of({"type": "json_object"}, {"type": "json_schema", "name": "s", "schema": SCHEMA}),
        "top_logprobs": _of(3),
        "moderation": _of({}),
    },
    "gemini": {"cachedContent": _of("cachedContents/1")},
    "generationConfig": {
        "candidateCount": _of(2),
        "responseMimeType": _of("application/json", "text/x.enum"),
        "responseSchema": _of({"type": "OBJECT"}),
        "responseJsonSchema": _of(SCHEMA),
        "responseFormat": _of({"type": "json"}),
        "responseModalities": _of(["IMAGE"], ["TEXT", "AUDIO"]),
        "responseLogprobs": _of(True),
        "logprobs": _of(5),
        "speechConfig": _of({}),
        "imageConfig": _of({}),
        "translationConfig": _of({}),
    },
}
"""What asks for something that is not served: a request with one of these is refused, and told what to do."""
