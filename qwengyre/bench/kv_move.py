"""A call moves between two engines in mid-generation: is anything computed twice, and how fast do the bytes go?"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import typer

from qwengyre.bench.embedded import QUICKSTART_SHAPE
from qwengyre.bench.output import JsonTarget, say, write_json

if TYPE_CHECKING:
    from qwengyre.engines.api import Engine, GenerateRequest, TokenChunk
    from qwengyre.transfer.api import Carrier

OUTPUT_TOKENS = 160
"""Enough that a call is still running when it is stopped."""
PREFIX = "qwengyre-bench-kv"


class Figures(msgspec.Struct, frozen=True):
    carrier: str
    moves: int
    prompt_tokens: int
    recomputed_tokens: int
    """Known tokens that the destination computed again, over all moves. 0 is right: the last token was never computed before."""
    is_identical: bool
    """Greedy continuations equal those of calls that did not move."""
    kv_bytes: int
    move_ms: float
    """Median CPU time of both engines: pin, read and place the blocks."""
    raw_ms: float
    """Median CPU time: expose and read as many bytes over the same carrier, nothing else."""
    share_of_raw: float


def kv_move(
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the call that moves.")] = 3000,
    moves: Annotated[int, typer.Option(help="How many calls move.")] = 10,
    carrier: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    layers: Annotated[int, typer.Option(help="Layers of the random model; more layers, more bytes a token.")] = 3,
    json_target: JsonTarget = None,
) -> None:
    """Move calls in mid-generation: tokens computed twice, equal continuations, speed against the bare carrier."""
    from qwengyre.testing.engines import write_tiny_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        model_dir = write_tiny_qwen3(Path(scratch), **(QUICKSTART_SHAPE | {"num_hidden_layers": layers}))
        figures = asyncio.run(move_calls(model_dir, carrier, prompt_tokens, moves))
    write_json(json_target, figures)
    say(f"{moves} calls of {prompt_tokens} tokens over {carrier}, {figures.kv_bytes / 1e6:.1f} MB each")
    say(f"recomputed_tokens {figures.recomputed_tokens}    continuations identical: {figures.is_identical}")
    say(f"move {figures.move_ms:.2f} ms    raw {figures.raw_ms:.2f} ms    share_of_raw {figures.share_of_raw:.2f}")


async def move_calls(model_dir: Path, kind: str, prompt_tokens: int, moves: int) -> Figures:
    """Each call starts at the source, is aborted after its first chunk, and ends at the destination."""
    from qwengyre.engines.config import EngineConfig
    from qwengyre.engines.embedded import EmbeddedEngine
    from qwengyre.transfer.carriers import open_carrier
    from qwengyre.transfer.config import TransferConfig

    carriers = [open_carrier(TransferConfig(carrier=_carrier(kind)), prefix=PREFIX) for _ in range(2)]
    limit = prompt_tokens + OUTPUT_TOKENS + 1
    config = EngineConfig(max_context_tokens=limit, kv_blocks=12 * (limit // 16 + 2))
    source, destination = (EmbeddedEngine(model_dir, each, config) for each in carriers)
    seconds, raw_seconds, recomputed, is_identical, kv_bytes = [], [], 0, True, 0
    for index in range(moves):
        whole = _request(
            f"call-{index}", np.random.default_rng(index).integers(0, 600, prompt_tokens).astype(np.int32).tobytes(), 48
        )
        async with aclosing(source.generate(whole)) as stream:
            done = list((await anext(stream)).token_ids)
            await source.abort([whole.request_id])
            done += [token for chunk in await _collect(stream) for token in chunk.token_ids]
        known = whole.token_ids + np.array(done, np.int32).tobytes()
        began = time.process_time()
        handle = await source.export_kv(known)
        assert handle is not None
        await destination.import_kv(handle)
        seconds.append(time.process_time() - began)
        kv_bytes = handle.exposure.num_bytes
        before = destination.stats().tokens_prefilled
        rest = await _tokens(destination, _request(whole.request_id, known, OUTPUT_TOKENS - len(done)))
        recomputed += destination.stats().tokens_prefilled - before
        is_identical &= done + rest == await _tokens(source, whole)
        await source.release(handle.handle_id)
        raw_seconds.append(_raw(carriers, kv_bytes))
    for each in (source, destination):
        await each.close()
    for each in carriers:
        each.close()
    move_s, raw_s = float(np.median(seconds)), float(np.median(raw_seconds))
    return Figures(kind, moves, prompt_tokens, recomputed, is_identical, kv_bytes, 1000 * move_s, 1000 * raw_s, raw_s / move_s)


def _raw(carriers: list[Carrier], num_bytes: int) -> float:
    content = {"bytes": np.ones(num_bytes, np.uint8)}
    target = {"bytes": np.ones(num_bytes, np.uint8)}
    began = time.process_time()
    exposure = carriers[0].expose(content, version=0, epoch=0)
    carriers[1].read(exposure, target)
    elapsed = time.process_time() - began
    carriers[0].release(exposure)
    return elapsed


def _request(name: str, token_ids: bytes, max_tokens: int) -> GenerateRequest:
    from qwengyre.engines.api import GenerateRequest, Sampling

    return GenerateRequest(name, token_ids, Sampling(0.0, max_tokens, (), 0))


async def _tokens(engine: Engine, request: GenerateRequest) -> list[int]:
    async with aclosing(engine.generate(request)) as stream:
        return [token for chunk in await _collect(stream) for token in chunk.token_ids]


async def _collect(stream: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


def _carrier(kind: str) -> Literal["shm", "tcp"]:
    if kind not in ("shm", "tcp"):
        raise typer.BadParameter("the carriers are shm and tcp")
    return kind  # type: ignore[return-value]
