"""An OpenAI-compatible completions server that takes and returns token ids with log-probs (vLLM does), as an engine.

It cannot hand out KV or versions: calls move by their tokens alone, and every token bears `version`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import msgspec
import numpy as np

from qwengyre.core.arrays import TOKEN
from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable
from qwengyre.engines.api import Capabilities, Capacity, EngineStats, FinishReason, GenerateRequest, KVHandle, TokenChunk
from qwengyre.transfer.api import Exposure


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


class CompletionsEngine:
    """`http` has the server's base URL (`http://host:port/v1`) and key; `model` is the name it serves under."""

    def __init__(self, http: httpx.AsyncClient, model: str, *, max_context_tokens: int, version: int = 0):
        self._http, self._model = http, model
        self._max_context_tokens, self._version = max_context_tokens, version
        self._aborted: set[str] = set()
        self._streams: dict[str, httpx.Response] = {}
        self._counts = {"tokens_generated": 0, "tokens_prefilled": 0}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        prompt = np.frombuffer(request.token_ids, TOKEN)
        if len(prompt) >= self._max_context_tokens:
            raise ContextOverflow(num_tokens=len(prompt), max_tokens=self._max_context_tokens)
        self._counts["tokens_prefilled"] += len(prompt)
        has_ended = False
        try:
            async with self._http.stream("POST", "completions", json=self._body(request, prompt)) as response:
                await _check(response)
                self._streams[request.request_id] = response
                async for line in response.aiter_lines():
                    chunk = self._chunk(request.request_id, line)
                    if chunk is None:
                        continue
                    has_ended = chunk.finish_reason is not None
                    yield chunk
                    if has_ended:
                        return
        except httpx.HTTPError as error:
            if request.request_id not in self._aborted:
                raise EngineUnavailable(f"{self._http.base_url}: {type(error).__name__} {error}") from error
        finally:
            self._streams.pop(request.request_id, None)
            was_aborted = request.request_id in self._aborted
            self._aborted.discard(request.request_id)
        if was_aborted and not has_ended:
            yield TokenChunk(request.request_id, (), (), self._version, finish_reason="abort")

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._aborted.add(request_id)
                await stream.aclose()

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        if mode == "abort":
            await self.abort(list(self._streams))

    async def resume(self) -> None:
        return None

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        raise EngineError("this server's weights are its own business: use a training engine")

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        return None

    async def import_kv(self, handle: KVHandle) -> int:
        raise EngineError("a completions server takes no KV")

    async def release(self, handle_id: str) -> None:
        return None

    async def offload(self) -> None:
        raise EngineError("a completions server cannot be offloaded from here")

    async def restore(self, snapshot: Exposure, version: int) -> None:
        raise EngineError("a completions server cannot be restored from here")

    def capacity(self) -> Capacity:
        return Capacity(running=len(self._streams), waiting=0, kv_blocks_free=0, kv_blocks_total=0, kv_bytes_total=0)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="completions",
            fingerprint=self._model,
            max_context_tokens=self._max_context_tokens,
            moves_kv=False,
            exact_logprobs=True,
        )

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
        await self._http.aclose()

    def _body(self, request: GenerateRequest, prompt: np.ndarray) -> dict:
        """`return_token_ids` is vLLM's; start it with `--logprobs-mode processed_logprobs`, so that they are of what was sampled."""
        sampling = request.sampling
        return {
            "model": self._model,
            "prompt": prompt.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "seed": (sampling.seed + sampling.first_index) % (1 << 31),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stream": True,
        }

    def _chunk(self, request_id: str, line: str) -> TokenChunk | None:
        if not line.startswith("data:") or line.endswith("[DONE]"):
            return None
        event = msgspec.json.decode(line[5:], type=_Event)
        if event.error is not None:
            raise EngineError(f"{self._http.base_url}: {event.error.get('message', event.error)}")
        if not event.choices:
            return None
        choice = event.choices[0]
        if choice.token_ids is None:
            raise EngineError(f"{self._http.base_url} gives no token ids: it must know return_token_ids, as vLLM does")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        self._counts["tokens_generated"] += len(choice.token_ids)
        reason: FinishReason | None = None
        if choice.finish_reason is not None:
            reason = "length" if choice.finish_reason == "length" else "stop"
        return TokenChunk(
            request_id=request_id,
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(logprob or 0.0 for logprob in logprobs),
            version=self._version,
            finish_reason=reason,
        )


async def _check(response: httpx.Response) -> None:
    if response.status_code < 400:
        return
    text = (await response.aread()).decode(errors="replace")[:400]
    if response.status_code in (429, 502, 503, 504):
        raise EngineUnavailable(f"{response.url}: {response.status_code} {text}")
    raise EngineError(f"{response.url}: {response.status_code} {text}")
