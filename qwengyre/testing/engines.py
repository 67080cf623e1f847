"""An engine without a model, for tests of everything around engines, and tiny random models for tests of the real one."""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from safetensors.numpy import save_file

from qwengyre.core.arrays import common_prefix
from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable, KVRefused
from qwengyre.engines.api import Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.engines.model import expected_shapes, read_spec
from qwengyre.transfer.api import Exposure, Transport

Script = Callable[[GenerateRequest], Sequence[int]]
"""The output of a request, from its first index on. A continuation must get what the whole call would have gone on with."""


def hashed_script(vocabulary: int = 100) -> Script:
    """Tokens that depend on the prompt without its output, the seed and the index alone."""

    def script(request: GenerateRequest) -> list[int]:
        sampling = request.sampling
        prompt = request.token_ids[: len(request.token_ids) - 4 * sampling.first_index]
        base = zlib.crc32(prompt) ^ sampling.seed
        indices = range(sampling.first_index, sampling.first_index + sampling.max_tokens)
        return [zlib.crc32(b"%d/%d" % (base, index)) % vocabulary for index in indices]

    return script


def replies(outputs: Sequence[Sequence[int]]) -> Script:
    """The n-th call gets `outputs[n]`; a continuation gets the rest of its call's output. Raises IndexError when they run out."""
    given: dict[bytes, Sequence[int]] = {}
    coming = iter(outputs)

    def script(request: GenerateRequest) -> Sequence[int]:
        first = request.sampling.first_index
        prompt = request.token_ids[: len(request.token_ids) - 4 * first]
        if first == 0:
            output = next(coming, None)
            if output is None:
                raise IndexError(f"the script has no reply for call {len(given)}")
            given[prompt] = output
        return given[prompt][first:]

    return script


def scripted_logprob(token: int) -> float:
    """The log-prob that ScriptedEngine gives a token; exact in float32."""
    return -0.5 - (token % 8) / 8


FINGERPRINT = "scripted"


class ScriptedEngine:
    """Implements `engines.api.CellEngine` with scripted tokens; everything else is kept: versions, pauses, prefixes, moves.

    With `held=True` a request makes tokens only when `grant` allows them, so that a test decides what happens when.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        transport: Transport | None = None,
        max_context_tokens: int = 4096,
        tokens_per_chunk: int = 1,
        held: bool = False,
    ):
        self._script = script or hashed_script()
        self._transport, self._max_context_tokens = transport, max_context_tokens
        self._tokens_per_chunk, self._held = tokens_per_chunk, held
        self._version, self._offloaded, self._closed = 0, False, False
        self._granted: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._running: dict[str, np.ndarray] = {}
        self._paused = False
        self._changed = asyncio.Condition()
        self._cached: list[np.ndarray] = []
        self._pinned: dict[str, Exposure] = {}
        self._numbers = itertools.count()
        self._counts = EngineStats(0, 0, 0, 0, 0, 0.0)
        self.requests: list[GenerateRequest] = []
        """Every request that was accepted, in order."""

    async def grant(self, request_id: str, num_tokens: int) -> None:
        """Let a request of a held engine make `num_tokens` more tokens, now or when it comes."""
        self._granted[request_id] = self._granted.get(request_id, 0) + num_tokens
        await self._notify()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        prompt, cached = await self._accept(request)
        request_id, sampling = request.request_id, request.sampling
        limit = min(sampling.max_tokens, self._max_context_tokens - len(prompt))
        output, made, sent = list(self._script(request))[:limit], 0, 0
        try:
            while True:
                aborted = await self._wait_turn(request_id, made)
                if not aborted:
                    made += 1
                    self._running[request_id] = np.append(self._running[request_id], np.int32(output[made - 1]))
                    self._count(tokens_generated=1)
                reason = "abort" if aborted else _reason(output[:made], sampling.stop_token_ids, len(output))
                if reason or made - sent == self._tokens_per_chunk:
                    tokens = tuple(output[sent:made])
                    logprobs = tuple(scripted_logprob(token) for token in tokens)
                    chunk = TokenChunk(request_id, tokens, logprobs, self._version, 0 if sent else cached, reason)
                    sent = made
                    if reason:
                        await self._end(request_id)
                        yield chunk
                        return
                    yield chunk
        finally:
            await self._end(request_id)

    async def abort(self, request_ids: list[str]) -> None:
        ids = [request_id for request_id in request_ids if request_id in self._running]
        self._aborted |= set(ids)
        async with self._changed:
            self._changed.notify_all()
            self._remember(ids)

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        self._paused = True
        if mode == "abort":
            await self.abort(list(self._running))

    async def resume(self) -> None:
        self._paused = False
        await self._notify()

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        self._need()
        if self._transport is not None:
            self._transport.read(snapshot)
        self._count(tokens_recomputed_at_publish=sum(len(tokens) for tokens in self._running.values()))
        self._version, self._cached = version, []

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        self._need()
        tokens = np.frombuffer(token_ids, np.int32)
        num_tokens = self._match(tokens)
        if not num_tokens or self._transport is None:
            return None
        exposure = self._transport.expose({"token_ids": tokens[:num_tokens]}, version=self._version, incarnation=0)
        handle_id = f"scripted/{next(self._numbers)}"
        self._pinned[handle_id] = exposure
        return KVHandle(handle_id, exposure, num_tokens, FINGERPRINT, self._version)

    async def import_kv(self, handle: KVHandle) -> int:
        self._need()
        if handle.fingerprint != FINGERPRINT or handle.version != self._version:
            raise KVRefused(f"KV of {handle.fingerprint} version {handle.version}, this engine has version {self._version}")
        assert self._transport is not None
        tokens = self._transport.read(handle.exposure)["token_ids"]
        self._count(tokens_imported=max(0, len(tokens) - self._match(tokens)))
        self._cached.append(tokens)
        return len(tokens)

    async def release(self, handle_id: str) -> None:
        if (exposure := self._pinned.pop(handle_id, None)) and self._transport is not None:
            self._transport.release(exposure)

    async def offload(self) -> None:
        if self._running:
            raise EngineError(f"{len(self._running)} calls are running: abort them first")
        self._offloaded, self._cached = True, []

    async def restore(self, snapshot: Exposure, version: int) -> None:
        self._offloaded = False
        await self.update_weights(snapshot, version)

    def capacity(self) -> Capacity:
        return Capacity(len(self._running), 0)

    def stats(self) -> EngineStats:
        return self._counts

    async def close(self) -> None:
        self._closed = True
        for handle_id in list(self._pinned):
            await self.release(handle_id)
        await self._notify()

    async def _accept(self, request: GenerateRequest) -> tuple[np.ndarray, int]:
        self._need()
        prompt = np.frombuffer(request.token_ids, np.int32)
        if not 0 < len(prompt) < self._max_context_tokens:
            raise ContextOverflow(num_tokens=len(prompt), max_tokens=self._max_context_tokens - 1)
        if request.request_id in self._running:
            raise EngineUnavailable(f"request {request.request_id} is running already")
        cached = self._match(prompt[:-1])
        self._running[request.request_id] = prompt
        self.requests.append(request)
        self._count(tokens_cached=cached, tokens_prefilled=len(prompt) - cached)
        return prompt, cached

    async def _wait_turn(self, request_id: str, made: int) -> bool:
        """Wait until one more token may be made; True when the request was aborted instead."""
        await asyncio.sleep(0)
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or request_id in self._aborted or (not self._paused and self._may_make(request_id, made))
            )
        self._need()
        return request_id in self._aborted

    def _may_make(self, request_id: str, made: int) -> bool:
        return not self._held or made < self._granted.get(request_id, 0)

    async def _end(self, request_id: str) -> None:
        self._remember([request_id])
        self._running.pop(request_id, None)
        self._aborted.discard(request_id)

    def _remember(self, request_ids: list[str]) -> None:
        self._cached += [self._running[request_id][:-1] for request_id in request_ids if request_id in self._running]

    def _match(self, tokens: np.ndarray) -> int:
        return max((common_prefix(tokens, cached) for cached in self._cached), default=0)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._counts, name) + number for name, number in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **counts)

    def _need(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if self._offloaded:
            raise EngineUnavailable("the engine is offloaded")


def _reason(output: list[int], stop_token_ids: tuple[int, ...], num_last: int) -> Literal["stop", "length"] | None:
    if output[-1] in stop_token_ids:
        return "stop"
    return "length" if len(output) == num_last else None


TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def tiny_parameters(model_dir: Path, seed: int) -> dict[str, np.ndarray]:
    """Random float32 parameters for the config in `model_dir`, by Hugging Face name; norm weights near 1."""
    generator = np.random.default_rng(seed)
    return {
        name: (generator.normal(1.0, 0.2, shape) if "norm" in name else generator.normal(0.0, 0.25, shape)).astype(np.float32)
        for name, shape in expected_shapes(read_spec(model_dir)).items()
    }


def write_tiny_qwen3(model_dir: Path, *, seed: int = 0, **changes: object) -> Path:
    """Write a random Qwen3 of a few thousand parameters in the Hugging Face format; `changes` go into config.json."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(TINY_QWEN3 | changes))
    save_file(tiny_parameters(model_dir, seed), model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir
