"""The embedded engine without threads or clocks: requests in, one iteration at a time, chunks out.

    submit -> waiting -> prefill pieces -> decoding -> stop, length or abort -> blocks left in the cache
                 ^------ no block left: the youngest call waits again ------'

`iterate` computes one pass for all running calls: one token of each decoding call and up to `prefill_chunk` prompt tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable
from qwengyre.engines.api import FinishReason, GenerateRequest, TokenChunk
from qwengyre.engines.calls import Call, Counts, PromptPiece, make_pass
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.kv import PrefixCache
from qwengyre.engines.model import Read, ReadPieces
from qwengyre.engines.passes import Pass, ServableModel
from qwengyre.engines.state_cache import StateCache
from qwengyre.models.placement import HOST
from qwengyre.models.probe import Probe
from qwengyre.transfer.api import Pieces


class EngineCore:
    """All state of an engine that holds weights. One owner calls it; an offloaded engine has none."""

    def __init__(self, spec: ServableModel, config: EngineConfig, *, version: int, device: torch.device = HOST):
        self.spec, self.config, self.version = spec, config, version
        self.weights, self.memory, self.forward, states = spec.open(config, device)
        snapshots = range(config.max_running, config.max_running + config.state_snapshots)
        self.recurrent = StateCache(config.kv_blocks, config.block_size, states, snapshots) if states else None
        """None for a model that keeps no states."""
        self.cache = self.recurrent or PrefixCache(config.kv_blocks, config.block_size)
        self.counts = Counts()
        self.waiting: deque[Call] = deque()
        self.running: list[Call] = []
        """In the order of admission."""
        self._calls: dict[str, Call] = {}
        self._chunks: list[TokenChunk] = []
        self._free_slots = list(range(config.max_running - 1, -1, -1))
        self._table_RB = np.zeros((config.max_running, -(-config.max_context_tokens // config.block_size)), np.int64)
        """Blocks of the running calls, by slot."""

    def has_work(self) -> bool:
        return bool(self._calls)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a call. Raises ContextOverflow; EngineUnavailable when the queue is full; EngineError on unknown tokens."""
        prompt = np.frombuffer(request.token_ids, np.int32)
        limit = self.config.max_context_tokens
        if not 0 < len(prompt) < limit:
            raise ContextOverflow(num_tokens=len(prompt), max_tokens=limit - 1)
        if prompt.min() < 0 or prompt.max() >= self.spec.vocabulary:
            raise EngineError(f"token ids lie in 0..{self.spec.vocabulary - 1}, the prompt has {prompt.min()}..{prompt.max()}")
        if request.sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, is {request.sampling.max_tokens}")
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
            tokens, logprobs = self.forward(make_pass(decoding, pieces, self._table_RB))
            self._note_routes(decoding, pieces)
            for call in decoding:
                call.computed += 1
            for piece in pieces:
                self._count(piece)
                if piece.is_last or self.recurrent:
                    self._remember_blocks(piece.call)
            ending = [piece.call for piece in pieces if piece.is_last]
            for call, token, logprob in zip(decoding + ending, tokens, logprobs, strict=True):
                self._append(call, token, logprob)
        return self.take_chunks()

    def abort(self, request_ids: list[str]) -> None:
        """End these calls with their partial tokens; their blocks stay in the cache."""
        for request_id in request_ids:
            if call := self._calls.get(request_id):
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
        self._go_on_under(lambda: self.weights.load(parameters), version)

    def load_weights_by(self, read: Read, like: Mapping[str, np.ndarray], version: int) -> None:
        """As `load_weights`, of parameters of the shapes of `like`, which `read(into)` fetches to where they stay."""
        self._go_on_under(lambda: self.weights.load_by(read, like), version)

    def _go_on_under(self, load: Callable[[], None], version: int) -> None:
        self.flush()
        load()
        self.forward.refresh()
        self.version = version
        self.cache.clear()
        for call in list(reversed(self.running)):
            call.recompute = max(call.recompute, call.computed)
            self._stop(call)
            self.waiting.appendleft(call)

    def load_folder(self, model_dir: Path) -> None:
        """The first weights of a core that has no call yet, from the folder of its model."""
        self.weights.load_folder(model_dir)
        self.forward.refresh()

    def fill_weights(self, read: Read, like: Mapping[str, np.ndarray]) -> None:
        """The first weights of a core that has no call yet, of the version that it was made with (`EngineWeights.load_by`)."""
        self.weights.load_by(read, like)
        self.forward.refresh()

    def prove(self, probe: Probe) -> None:
        """Compute the probe. Raises EngineError when the engine does not compute with the weights that it came with."""
        if reason := probe.refusal(self.logprobs(probe.token_ids), "float32"):
            raise EngineError(f"the engine does not compute with the weights of version {self.version}: {reason}")

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Of each token of a text but the first, or of as many as there are blocks for. No call may be running."""
        assert not self.running, "it is computed in the blocks and the slot of a call"
        size = self.config.block_size
        blocks = self.cache.take_many(-(-len(token_ids) // size))
        ids = np.array(token_ids[: len(blocks) * size], np.int64)
        if self.recurrent:
            self.recurrent.states.clear(0)
        at = np.arange(len(ids))
        batch = Pass(
            *(ids, at, np.zeros_like(at), at[:-1], np.array([blocks], np.int64)),
            temperatures=[],
            draws=[],
            num_decoding=0,
            pieces=[(0, 0, len(ids))],
        )
        logprobs_TV = self.forward.logits(batch).log_softmax(-1)
        self.cache.drop(blocks)
        found: list[float] = logprobs_TV.to(HOST).numpy()[at[:-1], ids[1:]].tolist()
        return found

    def import_blocks(self, token_ids: np.ndarray, read: ReadPieces) -> int:
        """Put keys and values computed elsewhere into the cache; return the number of leading tokens now cached.

        `read(into)` fetches regions as `BlockMemory.landing` names them, on the host straight into the blocks. What finds no room is left
        out.
        """
        size = self.config.block_size
        _, known = self.cache.match(token_ids)
        wanted = -(-len(token_ids) // size)
        if known == len(token_ids):
            return known
        blocks = self.cache.take_many(wanted)
        num_tokens = min(len(token_ids), len(blocks) * size)
        if self.recurrent and num_tokens < len(token_ids):
            num_tokens = 0
        try:
            if num_tokens > known:
                self._import(token_ids[:num_tokens], blocks, wanted - len(blocks), read)
                self.counts.tokens_imported += num_tokens - known
        finally:
            self.cache.drop(blocks)
        return max(known, num_tokens)

    def export_regions(self, token_ids: np.ndarray) -> tuple[int, dict[str, Pieces]]:
        """How many leading tokens are cached, and what is known of them, as regions on the host."""
        blocks, num_tokens = self.cache.match(token_ids)
        if not num_tokens:
            return 0, {}
        regions = self.memory.regions(blocks)
        if self.recurrent:
            regions |= self.recurrent.states.regions(self.recurrent.snapshot(token_ids[:num_tokens]))
        return num_tokens, regions

    def _import(self, token_ids: np.ndarray, blocks: list[int], num_more: int, read: ReadPieces) -> None:
        regions = self.memory.landing(blocks, num_more=num_more)
        if self.recurrent is None:
            read(regions)
            self.memory.landed(blocks, regions)
            self.cache.adopt(token_ids, blocks)
            return
        slot = self.recurrent.take_snapshot()
        try:
            state = self.recurrent.states.landing(slot)
            read(regions | state)
            self.memory.landed(blocks, regions)
            self.recurrent.states.landed(slot, state)
        except BaseException:
            self.recurrent.give_snapshot_back(slot)
            raise
        self.recurrent.keep(token_ids, blocks, slot)

    def _admit(self) -> None:
        """Give slots to waiting calls, in order, with what the cache knows of them."""
        while self.waiting and self._free_slots:
            call = self.waiting.popleft()
            call.slot = self._free_slots.pop()
            self.running.append(call)
            blocks, num_cached = self.cache.match(call.tokens[: call.size - 1])
            self.cache.hold(blocks)
            call.blocks, call.computed = blocks, num_cached
            self._table_RB[call.slot, : len(blocks)] = blocks
            if num_cached % self.config.block_size:
                self._own_last_block(call)
            if self.recurrent:
                self._start_state(self.recurrent, call, num_cached)
            if call.is_new:
                call.is_new, call.cached, call.first_routed = False, call.computed, call.computed
                self.counts.tokens_cached += call.computed

    def _start_state(self, cache: StateCache, call: Call, num_cached: int) -> None:
        """The state after the tokens that are cached; without it, from the beginning."""
        if num_cached and call.computed == num_cached:
            cache.states.copy(cache.snapshot(call.tokens[:num_cached]), call.slot)
            return
        cache.drop(call.blocks)
        call.blocks, call.computed = [], 0
        cache.states.clear(call.slot)

    def _own_last_block(self, call: Call) -> None:
        """Copy the last block, which is shared and not full: the call will write to it."""
        shared = call.blocks.pop()
        call.computed = len(call.blocks) * self.config.block_size + call.computed % self.config.block_size
        if self._reserve(call, call.computed):
            self.memory.copy_block(shared, call.blocks[-1])
        else:
            call.computed = len(call.blocks) * self.config.block_size
        self.cache.drop([shared])

    def _reserve(self, call: Call, num_tokens: int) -> bool:
        """Give `call` blocks for its first `num_tokens`; False when there are none left."""
        while len(call.blocks) * self.config.block_size < num_tokens:
            block = self.cache.take()
            if block is None:
                return False
            self._table_RB[call.slot, len(call.blocks)] = block
            call.blocks.append(block)
        return True

    def _plan(self) -> tuple[list[Call], list[PromptPiece]]:
        """Calls that decode, and the pieces of prompts that fit into this pass; the oldest call first."""
        decoding, pieces, budget, index = [], [], self.config.prefill_chunk, 0
        while index < len(self.running):
            call = self.running[index]
            missing = call.size - call.computed
            length = 1 if missing == 1 else self._piece_length(call, min(budget, missing))
            if not self._reserve(call, call.computed + length):
                self._preempt(self.running[-1])
                continue
            if missing == 1:
                decoding.append(call)
            elif length:
                pieces.append(PromptPiece(call, call.computed, length))
                budget -= length
            index += 1
        return decoding, pieces

    def _piece_length(self, call: Call, most: int) -> int:
        """Up to `most` tokens; where states are kept, to the end of a block, so that there is a state for what others share."""
        if not self.recurrent or not most:
            return most
        size, end = self.config.block_size, call.computed + most
        stop = (end - (end == call.size)) // size * size
        return stop - call.computed if stop > call.computed else most

    def _preempt(self, call: Call) -> None:
        """Give the blocks of `call` back; it waits, and computes again what no other call has kept."""
        self._remember_blocks(call)
        self._stop(call)
        self.waiting.appendleft(call)

    def _stop(self, call: Call) -> None:
        self.running.remove(call)
        self._free_slots.append(call.slot)
        self.cache.drop(call.blocks)
        call.blocks, call.computed = [], 0

    def _note_routes(self, decoding: list[Call], pieces: list[PromptPiece]) -> None:
        routes_NB = self.forward.routes
        if routes_NB is None:
            return
        for at, call in enumerate(decoding):
            call.note_routes(call.computed, routes_NB[at : at + 1])
        at = len(decoding)
        for piece in pieces:
            piece.call.note_routes(piece.start, routes_NB[at : at + piece.length])
            at += piece.length

    def _count(self, piece: PromptPiece) -> None:
        call, end = piece.call, piece.start + piece.length
        again = max(0, min(end, call.recompute) - piece.start)
        self.counts.tokens_recomputed_at_publish += again
        self.counts.tokens_prefilled += piece.length - again
        call.computed = end

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
        self._chunks.append(
            TokenChunk(call.request_id, token_ids, tuple(call.logprobs), self.version, cached, reason, *call.take_routes())
        )
        call.sent += len(token_ids)
        call.logprobs = []

    def _end(self, call: Call, reason: FinishReason) -> None:
        self._send(call, reason)
        del self._calls[call.request_id]
        if call in self.running:
            self._remember(call, call.computed)
            self._stop(call)
        else:
            self.waiting.remove(call)

    def _remember_blocks(self, call: Call) -> None:
        """Make what fills whole blocks of a call known to the cache."""
        self._remember(call, call.computed - call.computed % self.config.block_size)

    def _remember(self, call: Call, num_tokens: int) -> None:
        """Make the first tokens of a call known to the cache; where states are kept, only all that it has computed can be."""
        if self.recurrent is None:
            self.cache.adopt(call.tokens[:num_tokens], call.blocks)
        elif num_tokens == call.computed and num_tokens:
            slot = self.recurrent.take_snapshot()
            self.recurrent.states.copy(call.slot, slot)
            self.recurrent.keep(call.tokens[:num_tokens], call.blocks, slot)
        self._table_RB[call.slot, : len(call.blocks)] = call.blocks
