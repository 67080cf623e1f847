"""An OpenAI-compatible completions server that takes and returns token ids with log-probs (vLLM does), as an engine.

It cannot hand out KV or versions: calls move by their tokens alone, and every token bears `version`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from qwengyre.core.arrays import TOKEN
from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable, KVRefused
from qwengyre.engines.api import Capacity, EngineStats, FinishReason, GenerateRequest, KVHandle, TokenChunk

_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length"}
"""Any other end (`abort`, `error`) is an answer that is not whole: the call is held and asked again from its last token."""
_PLAIN_SAMPLING: Final = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""From the whole distribution: a server would else take what the model's generation_config.json recommends."""
KEY_VARIABLE: Final = "QWENGYRE_ENGINE_KEY"
PATIENT_S: Final = 3600.0
"""As long as a call may be held: a server that is busy with others answers late."""
_TOO_LONG: Final = re.compile(r"maximum context length (?:is|of) (\d+)")

Said = asyncio.Queue[TokenChunk | EngineError | None]
"""What has come back of one call; None is its end."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


def open_http(url: str, key: str | None = None) -> httpx.AsyncClient:
    """A client of the server at `url`, as patient as a long answer; its key is that of the environment unless one is given."""
    given = os.environ.get(KEY_VARIABLE, "none") if key is None else key
    return httpx.AsyncClient(
        base_url=url.rstrip("/") + "/",
        headers={"authorization": f"Bearer {given}"},
        timeout=httpx.Timeout(PATIENT_S, connect=10.0),
        limits=httpx.Limits(max_connections=None),
    )


class CompletionsEngine:
    """Implements `engines.api.Serving`. `http` has the server's base URL (`http://host:port/v1`) and key; `model` is the name it serves under."""

    def __init__(self, http: httpx.AsyncClient, model: str, *, max_context_tokens: int, version: int = 0):
        self._http, self._model = http, model
        self._max_context_tokens, self._version = max_context_tokens, version
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False
        self._counts = {"tokens_generated": 0, "tokens_prefilled": 0}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        prompt = np.frombuffer(request.token_ids, TOKEN)
        self._accept(request.request_id, len(prompt))
        self._counts["tokens_prefilled"] += len(prompt)
        chunks: Said = asyncio.Queue()
        asking = asyncio.create_task(self._ask(request, prompt, chunks))
        asking.add_done_callback(lambda _: chunks.put_nowait(None))
        self._requests[request.request_id] = asking
        try:
            while (item := await chunks.get()) is not None:
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
            if self._is_closed:
                raise EngineUnavailable(f"{self._http.base_url}: this side was closed")
            if asking.cancelled():
                yield TokenChunk(request.request_id, (), (), self._version, finish_reason="abort")
        finally:
            del self._requests[request.request_id]
            asking.cancel()

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests[request_id].cancel()

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        return None

    async def import_kv(self, handle: KVHandle) -> int:
        raise KVRefused("a completions server takes no KV")

    async def release(self, handle_id: str) -> None:
        return None

    def capacity(self) -> Capacity:
        return Capacity(running=len(self._requests), waiting=0)

    def stats(self) -> EngineStats:
        return EngineStats(
            tokens_generated=self._counts["tokens_generated"],
            tokens_prefilled=self._counts["tokens_prefilled"],
            tokens_cached=0,
            tokens_recomputed_at_publish=0,
            tokens_imported=0,
            busy_s=0.0,
        )

    async def close(self) -> None:
        self._is_closed = True
        await self.abort(list(self._requests))
        await self._http.aclose()

    def _accept(self, request_id: str, num_tokens: int) -> None:
        if self._is_closed:
            raise EngineUnavailable(f"{self._http.base_url}: this side was closed")
        if request_id in self._requests:
            raise EngineUnavailable(f"request {request_id} is running already")
        if num_tokens >= self._max_context_tokens:
            raise ContextOverflow(num_tokens=num_tokens, max_tokens=self._max_context_tokens - 1)

    def _body(self, request: GenerateRequest, prompt: np.ndarray) -> dict[str, object]:
        """`return_token_ids` is vLLM's; start it with `--logprobs-mode processed_logprobs`, so that they are of what was sampled."""
        sampling = request.sampling
        return {
            "model": self._model,
            "prompt": prompt.tolist(),
            "max_tokens": min(sampling.max_tokens, self._max_context_tokens - len(prompt)),
            "temperature": sampling.temperature,
            **_PLAIN_SAMPLING,
            "seed": (sampling.seed + sampling.first_index) % (1 << 31),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stream": True,
        }

    async def _ask(self, request: GenerateRequest, prompt: np.ndarray, chunks: Said) -> None:
        """Put what the server says into `chunks`, an error as the last of it. Cancelled by `abort`."""
        try:
            async with self._http.stream("POST", "completions", json=self._body(request, prompt)) as response:
                await _check(response, len(prompt))
                async for line in response.aiter_lines():
                    if line.startswith("data:") and not line.endswith("[DONE]"):
                        self._put(request.request_id, line[5:], chunks)
        except httpx.HTTPError as error:
            chunks.put_nowait(EngineUnavailable(f"{self._http.base_url}: {type(error).__name__} {error}"))
        except msgspec.MsgspecError as error:
            chunks.put_nowait(EngineError(f"{self._http.base_url} is not a completions server: {error}"))
        except EngineError as error:
            chunks.put_nowait(error)

    def _put(self, request_id: str, data: str, chunks: Said) -> None:
        event = msgspec.json.decode(data, type=_Event)
        if event.error is not None:
            raise EngineError(f"{self._http.base_url}: {event.error.get('message', event.error)}")
        if not event.choices:
            return
        choice = event.choices[0]
        if choice.token_ids is None:
            raise EngineError(f"{self._http.base_url} gives no token ids: it must know return_token_ids, as vLLM does")
        self._counts["tokens_generated"] += len(choice.token_ids)
        chunk = TokenChunk(
            request_id=request_id,
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(choice.logprobs.token_logprobs) if choice.logprobs else (),
            version=self._version,
            finish_reason=None if choice.finish_reason is None else _REASONS.get(choice.finish_reason, "abort"),
        )
        chunks.put_nowait(chunk)


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of the server's `/models`."""

    id: str
    max_model_len: int | None = None
    """vLLM's: longest prompt and answer together."""


async def served_models(http: httpx.AsyncClient) -> tuple[ServedModel, ...]:
    """What the server serves. Raises EngineUnavailable when nobody answers, EngineError for an answer of another kind."""
    try:
        response = await http.get("models")
        await _check(response, 0)
        return msgspec.json.decode(response.content, type=_Models).data
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{http.base_url}: {type(error).__name__} {error}") from error
    except msgspec.MsgspecError as error:
        raise EngineError(f"{http.base_url}models is not a list of models: {error}") from error


async def choose_served(http: httpx.AsyncClient, served_as: str, default: str) -> ServedModel:
    """The model of that name; without a name the one called `default`, or the only one. Raises EngineUnavailable, EngineError."""
    models, wanted = await served_models(http), served_as or default
    found = next((model for model in models if model.id == wanted), None)
    if found is None and len(models) == 1 and not served_as:
        found = models[0]
    if found is None:
        raise EngineError(f"{http.base_url} serves {', '.join(model.id for model in models) or 'nothing'}, not {wanted!r}")
    return found


class _Models(msgspec.Struct):
    data: tuple[ServedModel, ...]


async def _check(response: httpx.Response, num_tokens: int) -> None:
    if response.status_code < 400:
        return
    text = (await response.aread()).decode(errors="replace")[:400]
    if response.status_code == 400 and (found := _TOO_LONG.search(text)):
        raise ContextOverflow(num_tokens=num_tokens, max_tokens=int(found[1]))
    if response.status_code in (429, 502, 503, 504):
        raise EngineUnavailable(f"{response.url}: {response.status_code} {text}")
    raise EngineError(f"{response.url}: {response.status_code} {text}")
