"""What every engine does. Engines see only tokens; text is the gateway's business.

`Serving` is what the gateway needs; `CellEngine` is what a cell needs beside it. An engine computes in the process of its cell
(`embedded`, `paced`), in one beside it (`vllm`), or on a server of somebody else (`completions.py`). The gateway reaches the engine of a
cell over a connection (`engines/server.py`, `engines/remote.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol, runtime_checkable

import msgspec

from qwengyre.transfer.api import Exposure

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True):
    """How to sample. Fixed by the run, not by the harness; top-p, top-k, penalties and logit bias do not exist."""

    temperature: float
    """0 is greedy (never trained)."""
    max_tokens: int
    """Most tokens still to generate."""
    stop_token_ids: tuple[int, ...]
    """A sampled stop token is part of the output and ends it."""
    seed: int
    """Randomness is keyed by (seed, token index): the same call gives the same tokens wherever it runs."""
    first_index: int = 0
    """Index of the first token to generate, > 0 for a continuation, so that a move does not change what is drawn."""


class KVHandle(msgspec.Struct, frozen=True):
    """Pinned KV blocks of a prefix at the source, readable one-sidedly until released or the deadline."""

    handle_id: str
    exposure: Exposure
    num_tokens: int
    """Length of the prefix whose KV lies in the exposure."""
    fingerprint: str
    """Model, dtype, layout and block size; another fingerprint is refused and recomputed."""
    version: int
    """Policy version that computed the KV; imported only at the equal version."""


class GenerateRequest(msgspec.Struct, frozen=True):
    request_id: str
    token_ids: bytes
    """int32 prompt, with what was generated so far when this is a continuation."""
    sampling: Sampling


class TokenChunk(msgspec.Struct, frozen=True):
    """Some tokens of one request, in order. One weight version per chunk: a publish never lies inside one."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the distribution sampled from: log_softmax(logits / T)."""
    version: int
    cached_tokens: int = 0
    """In the first chunk: leading prompt tokens whose KV was found in the cache or imported."""
    finish_reason: FinishReason | None = None
    first_routed: int = 0
    num_routed: int = 0
    routes: bytes = b""
    """uint8 (num_routed, B): the experts of tokens `first_routed` and on of the call, prompt and output, router by router. Of a mixture
    of experts, from an engine that tells; each token's once, tokens found in the cache not at all."""


class Capacity(msgspec.Struct, frozen=True):
    """Calls in the engine."""

    running: int
    waiting: int


class EngineStats(msgspec.Struct, frozen=True):
    """Cumulative counts since the engine started."""

    tokens_generated: int
    tokens_prefilled: int
    tokens_cached: int
    tokens_recomputed_at_publish: int
    tokens_imported: int
    busy_s: float
    failure: str = ""
    """Why the engine ended without being asked to: it serves nothing any more, though its process lives."""


class Serving(Protocol):
    """What answers calls. Methods are safe to call from the event loop; none blocks it. Raises the EngineError family of core/errors."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the tokens. The last chunk has a finish_reason; an abort ends with "abort" after the partial tokens.

        Raises ContextOverflow, EngineUnavailable (offloaded or closed).
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Stop these requests; returns when none of them writes KV any more."""
        ...

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        """Pin the longest cached prefix of `token_ids` at the present version; None if nothing is cached or nothing can be read."""
        ...

    async def import_kv(self, handle: KVHandle) -> int:
        """Read the blocks into the prefix cache; return the number of tokens now cached. Raises KVRefused, StaleRead."""
        ...

    async def release(self, handle_id: str) -> None:
        """The destination has confirmed (or will never read): unpin. Unknown handles are ignored."""
        ...

    def capacity(self) -> Capacity: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


@runtime_checkable
class CellEngine(Serving, Protocol):
    """An engine whose weights and memory are those of its cell: it takes published weights, and makes room for the trainer."""

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop between two tokens. "keep" holds the running requests for `resume`."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        """Read the snapshot one-sidedly, in place. Running (paused) requests get their KV computed again."""
        ...

    async def offload(self) -> None:
        """Give back weights, KV cache and scratch memory; no request may be running."""
        ...

    async def restore(self, snapshot: Exposure, version: int) -> None:
        """Take memory again and read the present weights."""
        ...
