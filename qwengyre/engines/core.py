"""The embedded engine without threads or clocks: requests in, one iteration at a time, chunks out.

    submit -> waiting -> (row free) -> prefill pieces -> decoding -> stop, length or abort -> blocks left in the cache

`iterate` computes one pass for all running calls: one token of each decoding call and up to `prefill_chunk` prompt tokens.
A call is a row; its known tokens are `tokens[:size]`, those whose keys and values lie in the row `computed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from qwengyre.core.errors import ConfigError, ContextOverflow, EngineUnavailable
from qwengyre.engines.api import FinishReason, GenerateRequest, Sampling, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.kv import KVMemory, PrefixCache
from qwengyre.engines.model import EngineWeights, ModelSpec
from qwengyre.engines.native import forward as native
from qwengyre.engines.passes import Forward, Pass
from qwengyre.engines.sampler import DRAWS, uniforms
from qwengyre.engines.torch_forward import TorchForward

NATIVE_HIDDEN = 512
"""Wider models are served by torch, whose matrix products use all threads and caches better."""


@dataclass(slots=True)
class Call:
    """One running or waiting request."""

    request_id: str
    sampling: Sampling
    tokens: np.ndarray
    """int32, prompt then output, allocated to the largest size that it may reach."""
    size: int
    num_prompt: int
    last_size: int
    """Size at which the call ends with "length"."""
    row: int = -1
    computed: int = 0
    cached: int = 0
    recompute: int = 0
    """Tokens below this index had been computed before a publish."""
    sent: int = 0
    """Output tokens already in chunks."""
    logprobs: list[float] = field(default_factory=list)
    """Of output tokens not sent yet."""
    draws: list[float] = field(default_factory=list)
    draws_block: int = -1

    def draw(self) -> float:
        """The random number of the next token, keyed by (seed, token index)."""
        block, at = divmod(self.sampling.first_index + self.size - self.num_prompt, DRAWS)
        if block != self.draws_block:
            self.draws, self.draws_block = uniforms(self.sampling.seed, block), block
        return self.draws[at]


@dataclass(slots=True)
class Counts:
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    tokens_recomputed_at_publish: int = 0
    tokens_imported: int = 0


class EngineCore:
    """All state of an engine that holds weights. One owner calls it; an offloaded engine has none."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, *, version: int):
        self.spec, self.config, self.version = spec, config, version
        self.weights = EngineWeights(spec)
        self.memory = KVMemory(
            spec,
            num_rows=config.max_running,
            num_positions=config.max_context_tokens,
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
        )
        self.forward = make_forward(config, self.weights, self.memory)
        self.cache = PrefixCache(config.kv_blocks, config.block_size)
        self.counts = Counts()
        self.waiting: deque[Call] = deque()
        self.rows: list[Call | None] = [None] * config.max_running
        self._calls: dict[str, Call] = {}
        self._chunks: list[TokenChunk] = []

    @property
    def num_running(self) -> int:
        return len(self._calls) - len(self.waiting)

    def has_work(self) -> bool:
        return bool(self._calls)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a call. Raises ContextOverflow, or EngineUnavailable when the queue is full."""
        prompt = np.frombuffer(request.token_ids, np.int32)
        limit = self.config.max_context_tokens
        if not 0 < len(prompt) < limit:
            raise ContextOverflow(num_tokens=len(prompt), max_tokens=limit - 1)
        if len(self.waiting) >= self.config.max_waiting:
            raise EngineUnavailable(f"{len(self.waiting)} calls are waiting, the most this engine takes")
        if request.request_id in self._calls:
            raise EngineUnavailable(f"request {request.request_id} is running already")
        last_size = min(limit, len(prompt) + request.sampling.max_tokens)
        tokens = np.empty(last_size, np.int32)
        tokens[: len(prompt)] = prompt
        call = Call(request.request_id, request.sampling, tokens, len(prompt), len(prompt), last_size)
        self._calls[request.request_id] = call
        self.waiting.append(call)

    def iterate(self) -> list[TokenChunk]:
        """Compute one pass and return what is to be sent."""
        self._admit()
        decoding, pieces = self._plan()
        if decoding or pieces:
            ending = [call for call, start, length in pieces if start + length == call.size]
            tokens, logprobs = self.forward(_make_pass(decoding, pieces))
            for call in decoding:
                call.computed += 1
            for call, start, length in pieces:
                self._count_piece(call, start, length)
            for call in ending:
                self._remember(call)
            for call, token, logprob in zip(decoding + ending, tokens, logprobs, strict=True):
                self._append(call, token, logprob)
        return self.take_chunks()

    def abort(self, request_ids: list[str]) -> None:
        """End these calls with their partial tokens; their blocks stay in the cache."""
        for request_id in request_ids:
            if call := self._calls.get(request_id):
                if call.row < 0:
                    self.waiting.remove(call)
                self._end(call, "abort")

    def abort_all(self) -> None:
        self.abort(list(self._calls))

    def flush(self) -> None:
        """Put every token that was not sent yet into a chunk: what follows is of another version, or is not soon."""
        for call in self._calls.values():
            if call.logprobs:
                self._send(call, None)

    def take_chunks(self) -> list[TokenChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def set_weights(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Fill the weights of an engine that has no calls yet."""
        self.weights.load(parameters)
        self.forward.refresh()

    def load_weights(self, parameters: Mapping[str, np.ndarray], version: int) -> None:
        """Go on under other weights: running calls compute their keys and values again, chunks never span the change."""
        self.flush()
        self.set_weights(parameters)
        self.version = version
        self.cache.clear()
        running = [call for call in self.rows if call is not None]
        for call in reversed(running):
            call.recompute = max(call.recompute, call.computed)
            self._leave_row(call)
            self.waiting.appendleft(call)

    def _admit(self) -> None:
        """Give free rows to waiting calls, in order, with what the cache knows of them."""
        while self.waiting and None in self.rows:
            call = self.waiting.popleft()
            call.row = self.rows.index(None)
            self.rows[call.row] = call
            blocks, num_cached = self.cache.match(call.tokens[: call.size - 1])
            with torch.inference_mode():
                self.memory.load(call.row, blocks, num_cached)
            call.computed = num_cached
            if call.size == call.num_prompt and not call.recompute:
                call.cached = num_cached
                self.counts.tokens_cached += num_cached

    def _leave_row(self, call: Call) -> None:
        self.rows[call.row] = None
        call.row, call.computed = -1, 0

    def _plan(self) -> tuple[list[Call], list[tuple[Call, int, int]]]:
        """Calls that decode, and the pieces (call, start, length) of prompts that fit into this pass."""
        decoding, pieces, budget = [], [], self.config.prefill_chunk
        for call in self.rows:
            if call is None:
                continue
            missing = call.size - call.computed
            if missing == 1:
                decoding.append(call)
            elif budget:
                length = min(budget, missing)
                pieces.append((call, call.computed, length))
                budget -= length
        return decoding, pieces

    def _count_piece(self, call: Call, start: int, length: int) -> None:
        again = max(0, min(start + length, call.recompute) - start)
        self.counts.tokens_recomputed_at_publish += again
        self.counts.tokens_prefilled += length - again
        call.computed += length

    def _append(self, call: Call, token: int, logprob: float) -> None:
        call.tokens[call.size] = token
        call.logprobs.append(logprob)
        size = call.size = call.size + 1
        self.counts.tokens_generated += 1
        if token in call.sampling.stop_token_ids:
            self._end(call, "stop")
        elif size == call.last_size:
            self._end(call, "length")
        elif len(call.logprobs) >= self.config.stream_interval:
            self._send(call, None)

    def _send(self, call: Call, reason: FinishReason | None) -> None:
        start = call.num_prompt + call.sent
        token_ids = tuple(call.tokens[start : call.size].tolist())
        cached = call.cached if call.sent == 0 else 0
        self._chunks.append(TokenChunk(call.request_id, token_ids, tuple(call.logprobs), self.version, cached, reason))
        call.sent += len(token_ids)
        call.logprobs = []

    def _end(self, call: Call, reason: FinishReason) -> None:
        self._send(call, reason)
        del self._calls[call.request_id]
        if call.row >= 0:
            self._remember(call)
            self._leave_row(call)

    def _remember(self, call: Call) -> None:
        """Leave what the row holds in the prefix cache."""
        placed = self.cache.insert(call.tokens[: call.computed])
        with torch.inference_mode():
            self.memory.save(call.row, placed, call.computed)


def make_forward(config: EngineConfig, weights: EngineWeights, memory: KVMemory) -> Forward:
    """The kernels of the config. Raises ConfigError when native ones are demanded and cannot be had."""
    can_be_native = native.is_supported(weights.spec)
    if config.kernels == "native" and not can_be_native:
        raise ConfigError("no C compiler, or a model shape that the kernels lack; use 'auto' or 'torch'", key="engine.kernels")
    is_small = weights.spec.hidden <= NATIVE_HIDDEN and config.num_threads == 1
    if config.kernels == "native" or (config.kernels == "auto" and can_be_native and is_small):
        return native.NativeForward(weights, memory)
    return TorchForward(weights, memory)


def _make_pass(decoding: list[Call], pieces: list[tuple[Call, int, int]]) -> Pass:
    token_ids = [call.tokens[call.size - 1] for call in decoding]
    positions = [call.size - 1 for call in decoding]
    row_of = [call.row for call in decoding]
    wanted, calls = list(range(len(decoding))), list(decoding)
    for call, start, length in pieces:
        token_ids += call.tokens[start : start + length].tolist()
        positions += range(start, start + length)
        row_of += [call.row] * length
        if start + length == call.size:
            wanted.append(len(token_ids) - 1)
            calls.append(call)
    return Pass(
        *(np.array(values, np.int64) for values in (token_ids, positions, row_of, wanted)),
        temperatures=[call.sampling.temperature for call in calls],
        draws=[call.draw() for call in calls],
        num_decoding=len(decoding),
        pieces=[(call.row, start, length) for call, start, length in pieces],
    )
