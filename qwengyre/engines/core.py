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

from qwengyre.core.errors import ContextOverflow, EngineUnavailable
from qwengyre.engines.api import FinishReason, GenerateRequest, Sampling, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.forward import STRIDE, Forward, Pass, Piece
from qwengyre.engines.kv import KVMemory, PrefixCache, anonymous
from qwengyre.engines.model import EngineWeights, ModelSpec
from qwengyre.engines.sampler import DRAWS, sample, uniforms


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
        num_positions = -(-(config.max_context_tokens + 1) // STRIDE) * STRIDE
        self.scratch = num_positions - 1
        self.weights = EngineWeights(spec)
        self.memory = KVMemory(
            spec,
            num_rows=config.max_running,
            num_positions=num_positions,
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
        )
        mask = anonymous(config.max_running, num_positions)
        self._mask_RP = mask.numpy()
        self._mask_RP[:] = -np.inf
        self._mask_RP[:, 0] = 0.0
        self.cache = PrefixCache(config.kv_blocks, config.block_size)
        self.forward = Forward(self.weights, self.memory, mask)
        self.counts = Counts()
        self.waiting: deque[Call] = deque()
        self.rows: list[Call | None] = [None] * config.max_running
        self._calls: dict[str, Call] = {}
        self._chunks: list[TokenChunk] = []
        self._token_R = np.zeros(config.max_running, np.int64)
        self._position_R = np.full(config.max_running, self.scratch, np.int64)
        self._row_R = np.arange(config.max_running, dtype=np.int64)

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
        batch, sampling = self._plan()
        if batch is not None:
            with torch.inference_mode():
                logits = self.forward(batch)
                tokens, logprobs = sample(logits, *self._draws(batch, sampling))
            self._commit(batch, sampling, tokens, logprobs)
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

    def load_weights(self, parameters: Mapping[str, np.ndarray], version: int) -> None:
        """Go on under other weights: running calls compute their keys and values again, chunks never span the change."""
        self.flush()
        self.weights.load(parameters)
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
            if call.size - call.computed == 1:
                self._start_decoding(call)

    def _start_decoding(self, call: Call) -> None:
        self._mask_RP[call.row, : call.size] = 0.0
        self._token_R[call.row] = call.tokens[call.size - 1]
        self._position_R[call.row] = call.size - 1

    def _leave_row(self, call: Call) -> None:
        self.rows[call.row] = None
        self._position_R[call.row] = self.scratch
        self._mask_RP[call.row, 1:] = -np.inf
        call.row, call.computed = -1, 0

    def _plan(self) -> tuple[Pass | None, list[Call]]:
        """The next pass, and the calls that get a token from it: decoding ones by row, then those whose prompt ends."""
        position_R = self._position_R
        decoding = [call for call in self.rows if call is not None and position_R[call.row] != self.scratch]
        size = decoding[-1].row + 1 if decoding else 0
        reach = -(-max((call.size for call in decoding), default=0) // STRIDE) * STRIDE
        pieces = self._plan_pieces()
        if not size and not pieces:
            return None, []
        token_parts, position_parts, row_parts = [self._token_R[:size]], [position_R[:size]], [self._row_R[:size]]
        for call, piece in pieces:
            end = piece.start + piece.length
            token_parts.append(call.tokens[piece.start : end])
            position_parts.append(np.arange(piece.start, end))
            row_parts.append(np.full(piece.length, piece.row))
        joined = [np.concatenate(parts) if pieces else parts[0] for parts in (token_parts, position_parts, row_parts)]
        batch = Pass(*(torch.from_numpy(part) for part in joined), num_decoding=size, reach=reach)
        batch.pieces = [piece for _, piece in pieces]
        return batch, decoding + [call for call, _ in pieces]

    def _plan_pieces(self) -> list[tuple[Call, Piece]]:
        budget, pieces = self.config.prefill_chunk, []
        for call in self.rows:
            if call is None or self._position_R[call.row] != self.scratch:
                continue
            length = min(budget, call.size - call.computed)
            if length == 0:
                break
            pieces.append((call, Piece(call.row, call.computed, length)))
            budget -= length
        return pieces

    def _draws(self, batch: Pass, calls: list[Call]) -> tuple[list[float], list[float]]:
        """Temperature and random number of every row of logits; rows that nobody wants get any."""
        num_rows = batch.num_decoding + len(batch.pieces)
        temperatures, draws = [1.0] * num_rows, [0.0] * num_rows
        for at, call in zip(_logit_rows(batch, calls), calls, strict=True):
            temperatures[at], draws[at] = call.sampling.temperature, call.draw()
        return temperatures, draws

    def _commit(self, batch: Pass, calls: list[Call], tokens: list[int], logprobs: list[float]) -> None:
        num_decoding = len(calls) - len(batch.pieces)
        for index, (at, call) in enumerate(zip(_logit_rows(batch, calls), calls, strict=True)):
            if index >= num_decoding:
                self._count_piece(call, batch.pieces[index - num_decoding])
                if call.computed < call.size:
                    continue
                self._remember(call)
            else:
                call.computed += 1
            self._append(call, tokens[at], logprobs[at])
            if index >= num_decoding and call.row >= 0:
                self._start_decoding(call)

    def _count_piece(self, call: Call, piece: Piece) -> None:
        again = max(0, min(piece.start + piece.length, call.recompute) - piece.start)
        self.counts.tokens_recomputed_at_publish += again
        self.counts.tokens_prefilled += piece.length - again
        call.computed += piece.length

    def _append(self, call: Call, token: int, logprob: float) -> None:
        call.tokens[call.size] = token
        call.logprobs.append(logprob)
        size = call.size = call.size + 1
        self.counts.tokens_generated += 1
        if token in call.sampling.stop_token_ids:
            self._end(call, "stop")
        elif size == call.last_size:
            self._end(call, "length")
        else:
            row = call.row
            self._token_R[row] = token
            self._position_R[row] = size - 1
            self._mask_RP[row, size - 1] = 0.0
            if len(call.logprobs) >= self.config.stream_interval:
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


def _logit_rows(batch: Pass, calls: list[Call]) -> list[int]:
    """Row of logits of each call: a decoding call has its own row, pieces follow the last one."""
    num_decoding = len(calls) - len(batch.pieces)
    tail = range(batch.num_decoding, batch.num_decoding + len(batch.pieces))
    return [call.row for call in calls[:num_decoding]] + list(tail)
