"""A call moves between two engines in mid-generation: is anything computed twice, and how fast do the bytes go?"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import typer

from qwengyre.bench.embedded import QUICKSTART_SHAPE
from qwengyre.bench.output import say
from qwengyre.bench.transports import TransportName, open_bench_transport
from qwengyre.cli.json_output import JsonTarget, write_json

if TYPE_CHECKING:
    from qwengyre.engines.api import GenerateRequest, Serving, TokenChunk
    from qwengyre.transfer.api import Transport

OUTPUT_TOKENS: Final = 160
"""Enough that a call is still running when it is stopped."""
CALLS_IN_CACHE: Final = 3
"""So many calls fill the caches, and are moved before the first that counts: memory is then as warm as in a run."""
PREFIX = "qwengyre-bench-kv"


class MovedCall(NamedTuple):
    """One call that moved."""

    cpu_s: float
    kv_bytes: int
    recomputed_tokens: int
    is_identical: bool


class EnginePair(Protocol):
    """Two engines, and what they cost."""

    @property
    def source(self) -> Serving: ...

    @property
    def destination(self) -> Serving: ...

    def others_cpu_s(self) -> float:
        """CPU seconds so far of what computes in processes of its own."""
        ...

    async def placing_s(self) -> float:
        """CPU seconds so far of placing blocks that were not placed by `import_kv`."""
        ...

    async def close(self) -> None: ...


class EmbeddedPair:
    def __init__(self, model_dir: Path, transport: str, max_context_tokens: int):
        from qwengyre.engines.config import EngineConfig
        from qwengyre.engines.embedded import EmbeddedEngine

        config = EngineConfig(max_context_tokens=max_context_tokens, kv_blocks=CALLS_IN_CACHE * (max_context_tokens // 16 + 2))
        self._transports = [open_bench_transport(transport, PREFIX) for _ in range(2)]
        self.source, self.destination = (EmbeddedEngine(model_dir, each, config) for each in self._transports)

    def others_cpu_s(self) -> float:
        return 0.0

    async def placing_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        for each in (self.source, self.destination):
            await each.close()
        for transport in self._transports:
            transport.close()


def _pair(engine: str) -> Callable[[Path, str, int], EnginePair]:
    if engine == "vllm":
        from qwengyre.engines.vllm.launch import require_vllm

        require_vllm()
        from qwengyre.bench.kv_move_vllm import VLLMPair

        return lambda model_dir, transport, limit: VLLMPair(model_dir, transport, PREFIX, limit, CALLS_IN_CACHE)
    if engine != "embedded":
        raise typer.BadParameter(f"the engines are embedded and vllm, not {engine!r}")
    return EmbeddedPair


class MoveFigures(msgspec.Struct, frozen=True):
    engine: str
    transport: str
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
    """Median CPU time: expose and read as many bytes over the same transport, nothing else."""
    share_of_raw: float


def kv_move(
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the call that moves.")] = 3000,
    moves: Annotated[int, typer.Option(min=1, help="How many calls move.")] = 10,
    transport: TransportName = "shm",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model, 512 bytes a token each.")] = 24,
    engine: Annotated[str, typer.Option(help="embedded or vllm.")] = "embedded",
    json_target: JsonTarget = None,
) -> None:
    """Move calls in mid-generation: tokens computed twice, equal continuations, speed against the bare transport."""
    from qwengyre.testing.engines import write_tiny_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        model_dir = write_tiny_qwen3(Path(scratch), **(QUICKSTART_SHAPE | {"num_hidden_layers": layers}))
        figures = asyncio.run(move_calls(engine, model_dir, transport, prompt_tokens, moves))
    write_json(json_target, figures)
    say(
        f"{moves} calls of {prompt_tokens} tokens over {transport} between {engine} engines, {figures.kv_bytes / 1e6:.1f} MB each"
    )
    say(f"recomputed_tokens {figures.recomputed_tokens}    continuations identical: {figures.is_identical}")
    say(f"move {figures.move_ms:.2f} ms    raw {figures.raw_ms:.2f} ms    share_of_raw {figures.share_of_raw:.2f}")


async def move_calls(engine: str, model_dir: Path, kind: str, prompt_tokens: int, moves: int) -> MoveFigures:
    """Each call starts at the source, is aborted after its first chunk, and ends at the destination."""
    moved, raw_s = [], []
    async with AsyncExitStack() as stack:
        transports = [stack.enter_context(closing(open_bench_transport(kind, PREFIX))) for _ in range(2)]
        pair = _pair(engine)(model_dir, kind, prompt_tokens + OUTPUT_TOKENS + 1)
        stack.push_async_callback(pair.close)
        for index in range(CALLS_IN_CACHE + moves):
            moved.append(await _move(pair, _call(index, prompt_tokens)))
            raw_s.append(_raw(transports, moved[-1].kv_bytes))
    counted = moved[CALLS_IN_CACHE:]
    move_ms = 1000 * float(np.median([one.cpu_s for one in counted]))
    raw_ms = 1000 * float(np.median(raw_s[CALLS_IN_CACHE:]))
    return MoveFigures(
        engine=engine,
        transport=kind,
        moves=moves,
        prompt_tokens=prompt_tokens,
        recomputed_tokens=sum(one.recomputed_tokens for one in counted),
        is_identical=all(one.is_identical for one in moved),
        kv_bytes=counted[-1].kv_bytes,
        move_ms=move_ms,
        raw_ms=raw_ms,
        share_of_raw=raw_ms / move_ms,
    )


async def _move(pair: EnginePair, whole: GenerateRequest) -> MovedCall:
    source, destination = pair.source, pair.destination
    async with aclosing(source.generate(whole)) as stream:
        done = list((await anext(stream)).token_ids)
        await source.abort([whole.request_id])
        done += [token for chunk in await _collect(stream) for token in chunk.token_ids]
    known = whole.token_ids + np.array(done, np.int32).tobytes()
    placing_s = -await pair.placing_s()
    cpu_s = -pair.others_cpu_s() - time.process_time()
    handle = await source.export_kv(known)
    assert handle is not None
    await destination.import_kv(handle)
    cpu_s += time.process_time()
    cpu_s += pair.others_cpu_s()
    before = destination.stats().tokens_prefilled
    rest = await _tokens(destination, _request(whole.request_id, known, OUTPUT_TOKENS - len(done)))
    placing_s += await pair.placing_s()
    unknown = len(known) // 4 - handle.num_tokens or 1  # the last token is computed in any case: it says what comes next
    recomputed = max(0, destination.stats().tokens_prefilled - before - unknown)
    await source.release(handle.handle_id)
    return MovedCall(cpu_s + placing_s, handle.exposure.num_bytes, recomputed, done + rest == await _tokens(source, whole))


def _call(index: int, num_tokens: int) -> GenerateRequest:
    tokens = np.random.default_rng(index).integers(0, 600, num_tokens).astype(np.int32)
    return _request(f"call-{index}", tokens.tobytes(), OUTPUT_TOKENS)


def _raw(transports: list[Transport], num_bytes: int) -> float:
    content = {"bytes": np.ones(num_bytes, np.uint8)}
    target = {"bytes": np.ones(num_bytes, np.uint8)}
    began = time.process_time()
    exposure = transports[0].expose(content, version=0, incarnation=0)
    transports[1].read(exposure, target)
    elapsed = time.process_time() - began
    transports[0].release(exposure)
    return elapsed


def _request(name: str, token_ids: bytes, max_tokens: int) -> GenerateRequest:
    from qwengyre.engines.api import GenerateRequest, Sampling

    return GenerateRequest(name, token_ids, Sampling(0.0, max_tokens, (), 0))


async def _tokens(engine: Serving, request: GenerateRequest) -> list[int]:
    async with aclosing(engine.generate(request)) as stream:
        return [token for chunk in await _collect(stream) for token in chunk.token_ids]


async def _collect(stream: AsyncGenerator[TokenChunk, None]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]
