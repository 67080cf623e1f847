"""`python -m qwengyre.bench.stamping_engine ADDRESS READY CHUNKS PACE_S`: an engine in a process of its own, whose chunks say when they left."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from qwengyre.bench.pass_through import SECRET
from qwengyre.engines.api import FinishReason, GenerateRequest, TokenChunk
from qwengyre.engines.server import EngineServer
from qwengyre.rpc.processes import announce
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.tokenizers import byte_tokenizer

STAMP: Final = re.compile(r"@([0-9a-f]+)")
"""Microseconds of the monotonic clock, which all processes of a machine share."""


def stamp() -> str:
    return f"@{time.monotonic_ns() // 1000:x}"


def ages_s(text: str) -> list[float]:
    """Seconds since each stamp in `text`."""
    now = time.monotonic_ns() // 1000
    return [(now - int(found, 16)) / 1e6 for found in STAMP.findall(text)]


class StampingEngine(ScriptedEngine):
    """Every request is answered by `num_chunks` stamps, one every `pace_s` seconds."""

    def __init__(self, num_chunks: int, pace_s: float) -> None:
        super().__init__()
        self._num_chunks, self._pace_s = num_chunks, pace_s
        self._encode = byte_tokenizer().encode

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        due = time.monotonic()
        for left in reversed(range(self._num_chunks)):
            due += self._pace_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            reason: FinishReason | None = None if left else "stop"
            tokens = tuple(self._encode(stamp() if left else f"{stamp()}<|im_end|>").ids)
            yield TokenChunk(request.request_id, tokens, (-0.5,) * len(tokens), 0, 0, reason)


async def main(address: str, ready: Path, num_chunks: int, pace_s: float) -> None:
    server = EngineServer(StampingEngine(num_chunks, pace_s), secret=SECRET)
    announce(ready, (await server.serve(address)).encode())
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
