"""An engine that takes the time a device would and computes nothing: everything around it is real.

Tokens, their pace, and the duration of role switches come from a plan (`paced_plan`). Calls stream, abort, move with their KV and go on
elsewhere as with a real engine; log-probs are constant. No torch: a cell with it starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from typing import Final, Literal

import msgspec
import numpy as np
from tokenizers import Tokenizer

from qwengyre.core.arrays import TOKEN, common_prefix
from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable, KVRefused
from qwengyre.engines.api import Capacity, EngineStats, FinishReason, GenerateRequest, KVHandle, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.paced.plan import PacedPlan
from qwengyre.transfer.api import Exposure, Transport

NUM_CHUNKS: Final = 4
"""Parts in which an answer is streamed: enough to be moved in mid-generation, few enough to cost little."""
LOGPROB: Final = -1.0
FINGERPRINT: Final = "paced"
END: Final = "<|im_end|>"


class PacedEngine:
    """Implements `engines.api.CellEngine`. Safe on one event loop."""

    def __init__(self, plan: PacedPlan, tokenizer: Tokenizer, transport: Transport, config: EngineConfig):
        """Raises EngineError for a tokenizer without the token that ends a reply."""
        self._plan, self._tokenizer, self._transport, self._config = plan, tokenizer, transport, config
        if (end_id := tokenizer.token_to_id(END)) is None:
            raise EngineError(
                f"a paced run ends its replies with {END}, which the tokenizer of this policy lacks: take a Qwen policy"
            )
        self._end_id = end_id
        self._version = 0
        self._is_offloaded = self._is_closed = False
        self._aborts: dict[str, asyncio.Event] = {}
        """One for every running request."""
        self._pinned: dict[str, Exposure] = {}
        self._imported: list[np.ndarray] = []
        self._numbers = itertools.count()
        self._stats = EngineStats(0, 0, 0, 0, 0, 0.0)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        cached = await self._accept(request)
        aborted = self._aborts[request.request_id] = asyncio.Event()
        try:
            async for chunk in self._stream(request, cached, aborted):
                yield chunk
        finally:
            self._aborts.pop(request.request_id, None)

    async def _stream(self, request: GenerateRequest, cached: int, aborted: asyncio.Event) -> AsyncGenerator[TokenChunk, None]:
        """Token i of n is there after (i + 1) / n of the call's time; a continuation takes its share of it."""
        call, first = self._plan.call(request.request_id), request.sampling.first_index
        answer = [*self._tokenizer.encode(call.text, add_special_tokens=False).ids, self._end_id]
        token_s, began, sent = call.decode_s / len(answer), time.monotonic(), first
        room = self._config.max_context_tokens - len(request.token_ids) // TOKEN.itemsize
        stop = min(len(answer), first + min(request.sampling.max_tokens, room))
        size = -(-len(answer) // NUM_CHUNKS)
        while sent < stop:
            due = min(sent + size, stop)
            await _wait(aborted, began + (due - first) * token_s)
            if self._is_closed:
                raise EngineUnavailable("this engine is closed")
            if aborted.is_set():
                due = min(due, max(sent, first + int((time.monotonic() - began) / token_s)))
            reason: FinishReason | None = (
                "abort" if aborted.is_set() else "stop" if due == len(answer) else "length" if due == stop else None
            )
            tokens = tuple(answer[sent:due])
            self._count(tokens_generated=len(tokens))
            yield TokenChunk(
                request.request_id, tokens, (LOGPROB,) * len(tokens), self._version, 0 if sent > first else cached, reason
            )
            if reason:
                self._count(busy_s=time.monotonic() - began)
                return
            sent = due

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._aborts:
                self._aborts[request_id].set()

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        if mode == "abort":
            await self.abort(list(self._aborts))

    async def resume(self) -> None:
        """Nothing was stopped: the plan prices a publish where the core exposes it."""

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        self._need_memory()
        self._transport.read(snapshot)
        self._version, self._imported = version, []

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        self._need_memory()
        tokens_T = np.frombuffer(token_ids, TOKEN)
        exposure = self._transport.expose({"token_ids": tokens_T}, version=self._version, incarnation=0)
        handle_id = f"paced/{next(self._numbers)}"
        self._pinned[handle_id] = exposure
        return KVHandle(handle_id, exposure, len(tokens_T), FINGERPRINT, self._version)

    async def import_kv(self, handle: KVHandle) -> int:
        self._need_memory()
        if handle.fingerprint != FINGERPRINT or handle.version != self._version:
            raise KVRefused(f"KV of {handle.fingerprint} version {handle.version}, this engine has version {self._version}")
        tokens_T = self._transport.read(handle.exposure)["token_ids"]
        assert isinstance(tokens_T, np.ndarray), "exported in one piece"
        self._imported.append(tokens_T)
        self._count(tokens_imported=len(tokens_T))
        return len(tokens_T)

    async def release(self, handle_id: str) -> None:
        if (exposure := self._pinned.pop(handle_id, None)) is not None:
            self._transport.release(exposure)

    async def offload(self) -> None:
        if self._aborts:
            raise EngineError(f"{len(self._aborts)} calls are running: abort them first")
        self._is_offloaded, self._imported = True, []
        await asyncio.sleep(self._plan.to_training_s)

    async def restore(self, snapshot: Exposure, version: int) -> None:
        await asyncio.sleep(self._plan.to_rollout_s)
        self._is_offloaded = False
        await self.update_weights(snapshot, version)

    def capacity(self) -> Capacity:
        return Capacity(len(self._aborts), 0)

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        self._is_closed = True
        await self.pause("abort")
        for handle_id in list(self._pinned):
            await self.release(handle_id)

    async def _accept(self, request: GenerateRequest) -> int:
        """Check a request; return the prompt tokens whose KV was imported."""
        self._need_memory()
        tokens_T = np.frombuffer(request.token_ids, TOKEN)
        num_tokens = len(tokens_T)
        if num_tokens >= self._config.max_context_tokens:
            raise ContextOverflow(num_tokens=num_tokens, max_tokens=self._config.max_context_tokens - 1)
        if len(self._aborts) >= self._config.max_running:
            raise EngineUnavailable(f"{len(self._aborts)} calls are running, as many as max_running allows")
        if request.request_id in self._aborts:
            raise EngineUnavailable(f"request {request.request_id} is running already")
        cached = max((common_prefix(tokens_T[:-1], imported_T) for imported_T in self._imported), default=0)
        self._count(tokens_cached=cached, tokens_prefilled=max(0, num_tokens - cached))
        return cached

    def _need_memory(self) -> None:
        if self._is_offloaded or self._is_closed:
            raise EngineUnavailable("this engine is offloaded" if self._is_offloaded else "this engine is closed")

    def _count(self, **added: float) -> None:
        fields = {name: getattr(self._stats, name) + value for name, value in added.items()}
        self._stats = msgspec.structs.replace(self._stats, **fields)


async def _wait(aborted: asyncio.Event, until: float) -> None:
    """Sleep until that time of the monotonic clock, or until the abort."""
    left = until - time.monotonic()
    if left > 0:
        try:
            await asyncio.wait_for(aborted.wait(), left)
        except TimeoutError:
            return
