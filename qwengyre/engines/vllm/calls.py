"""One call at the adapter: tokens as vLLM gives them, chunks as `engines.api` wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qwengyre.core.errors import EngineError
from qwengyre.engines.api import FinishReason, GenerateRequest, TokenChunk
from qwengyre.engines.vllm.imports import NamedImport

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan


class VLLMCall:
    """Collects tokens and cuts them into chunks of one version each. `chunks` ends with a finish reason or an error."""

    def __init__(self, request: GenerateRequest, name: str):
        self.request, self.name = request, name
        self.prompt = np.frombuffer(request.token_ids, np.int32)
        self.chunks: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()
        self.num_tokens = 0
        self.cached = 0
        self.finish_reason: FinishReason | None = None
        self.named_import: NamedImport | None = None
        """What vLLM puts into this call's blocks before it starts."""
        self.is_aborted = False
        self.spans: Sequence[WeightVersionSpan] | None = None
        """What the engine core says of the versions, at the end."""
        self.versions: list[tuple[int, int]] = []
        """(version, number of tokens) of what was sent, in order."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_unsent(self) -> int:
        return len(self._token_ids)

    @property
    def num_computed(self) -> int:
        """Known tokens with keys and values: all but the last. 0 before the first token."""
        return len(self.prompt) + self.num_tokens - 1 if self.num_tokens else 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._token_ids += token_ids
        self._logprobs += logprobs
        self.num_tokens += len(token_ids)

    def send(self, version: int) -> None:
        """Put what there is into one chunk; nothing if there is nothing to say."""
        if not self._token_ids and not self.is_over:
            return
        cached = 0 if self.versions else self.cached
        self.chunks.put_nowait(
            TokenChunk(
                self.request.request_id, tuple(self._token_ids), tuple(self._logprobs), version, cached, self.finish_reason
            )
        )
        self.versions.append((version, len(self._token_ids)))
        self._token_ids, self._logprobs = [], []

    def fail(self, error: EngineError) -> None:
        self.chunks.put_nowait(error)

    def versions_agree(self) -> bool:
        """Does the engine core, which counts which weights made which token, say of each what the chunks said?"""
        if self.spans is None:
            return True
        sent = [str(version) for version, count in self.versions for _ in range(count)]
        return sent == [span.version for span in self.spans for _ in range(span.end - span.start)]
