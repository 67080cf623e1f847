"""A completions server that knows token ids, as an engine; and the stand-alone command in front of it."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from qwengyre.core.arrays import TOKEN, pack
from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.completions import CompletionsEngine

SAMPLING = Sampling(temperature=0.7, max_tokens=9, stop_token_ids=(5,), seed=1 << 40, first_index=2)


def engine(answer, *, max_context_tokens: int = 100) -> CompletionsEngine:
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server/v1/")
    return CompletionsEngine(http, "policy", max_context_tokens=max_context_tokens)


def events(*choices: dict) -> bytes:
    lines = [b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices]
    return b"".join([*lines, b"data: [DONE]\n\n"])


async def collect(served: CompletionsEngine, prompt: list[int]) -> list:
    request = GenerateRequest(request_id="r", token_ids=pack(prompt, TOKEN), sampling=SAMPLING)
    return [chunk async for chunk in served.generate(request)]


async def test_tokens_and_logprobs_come_as_the_server_gives_them():
    asked = {}

    def answer(request: httpx.Request) -> httpx.Response:
        asked.update(json.loads(request.content), path=request.url.path)
        first = {"token_ids": [3, 4], "logprobs": {"token_logprobs": [-0.5, -1.25]}}
        last = {"token_ids": [5], "logprobs": {"token_logprobs": [-2.0]}, "finish_reason": "stop"}
        return httpx.Response(200, content=events(first, last))

    chunks = await collect(engine(answer), [1, 2])
    assert [chunk.token_ids for chunk in chunks] == [(3, 4), (5,)]
    assert np.concatenate([chunk.logprobs for chunk in chunks]).tolist() == [-0.5, -1.25, -2.0]
    assert [chunk.finish_reason for chunk in chunks] == [None, "stop"]
    assert (asked["path"], asked["prompt"], asked["temperature"], asked["max_tokens"]) == ("/v1/completions", [1, 2], 0.7, 9)
    assert asked["stop_token_ids"] == [5] and asked["return_token_ids"] is True


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(503, text="busy"), EngineUnavailable),
        (httpx.Response(404, text="no such model"), EngineError),
        (httpx.Response(200, content=events({"text": "x", "finish_reason": "stop"})), EngineError),
    ],
)
async def test_what_cannot_be_used_is_said(response, error):
    with pytest.raises(error, match="server"):
        await collect(engine(lambda request: response), [1])


async def test_lost_connection_is_an_engine_that_is_gone():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineUnavailable, match="refused"):
        await collect(engine(refuse), [1])


async def test_prompt_beyond_the_context_is_refused_here():
    with pytest.raises(ContextOverflow, match="prompt is too long: 3 tokens > 2 maximum"):
        await collect(engine(lambda request: httpx.Response(200), max_context_tokens=3), [1, 2, 3])
