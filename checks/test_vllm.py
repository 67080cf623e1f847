"""vLLM on this machine's CPU: the contract of every engine, and what only vLLM can do wrong. `make test-vllm`.

The tests of `tests/contract/test_engines.py` run here as they are. Starting an engine takes seconds, so they share a few,
each brought back to version 0 before it is handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from qwengyre.core.errors import EngineError, EngineUnavailable, StaleRead
from qwengyre.engines.api import CellEngine, GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.engines.model import read_spec
from qwengyre.engines.vllm import transfer
from qwengyre.engines.vllm.engine import VLLMEngine
from qwengyre.testing.engines import tiny_parameters, write_tiny_qwen3
from qwengyre.testing.families import published
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmTransport, cleanup
from qwengyre.transfer.transports import TransportPlace
from tests.contract import test_engines as contract
from tests.contract.launchers import wait_gone
from tests.contract.test_engines import *  # noqa: F403  the contract
from tests.unit.engines.exact import Errors, Qwen3, Row

LONG = 4096
CONFIG = EngineConfig(
    engine="vllm",
    max_running=4,
    max_context_tokens=contract.MAX_CONTEXT,
    block_size=32,
    kv_blocks=64,
    prefill_chunk=24,
    stream_interval=3,
    command_deadline_s=120,
)


class Pool:
    """Engines of one model in one event loop."""

    def __init__(self, model_dir: Path, prefix: str):
        self.model_dir, self.prefix = model_dir, prefix
        self.transport = ShmTransport(prefix)
        self.engines: list[VLLMEngine] = []
        self.published: dict[int, dict[str, np.ndarray]] = {}

    def start(self, config: EngineConfig = CONFIG) -> VLLMEngine:
        return VLLMEngine(self.model_dir, config, TransportPlace(TransferConfig(transport="shm"), self.prefix, "127.0.0.1"))

    async def take(self, index: int) -> VLLMEngine:
        """The engine of this number, with the weights of version 0 and nothing else."""
        if index < len(self.engines) and self.engines[index].stats().failure:
            del self.engines[index]
        if index >= len(self.engines):
            self.engines.append(self.start())
            return self.engines[-1]
        engine = self.engines[index]
        await engine.pause("abort")
        await engine.resume()
        snapshot = self.snapshot(0)
        await engine.restore(snapshot, 0)
        self.transport.release(snapshot)
        return engine

    def snapshot(self, version: int) -> Exposure:
        if version not in self.published:
            self.published[version] = published(self.model_dir, tiny_parameters(self.model_dir, seed=version))
        return self.transport.expose(self.published[version], version=version, incarnation=1)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        self.transport.close()
        assert cleanup(self.prefix) == 0, "an engine left exposed memory behind"


class VLLMBench:
    """`contract.Bench` over a pool."""

    kind = "vllm"
    cache_tokens = CONFIG.block_size

    def __init__(self, pool: Pool):
        self.pool, self.num_taken, self.exposed = pool, 0, []

    async def engine(self, *, holds: bool = False) -> CellEngine:
        self.num_taken += 1
        return await self.pool.take(self.num_taken - 1)

    def cell(self, engine: CellEngine) -> CellEngine:
        return engine

    async def hold(self, engine: CellEngine) -> None:
        await engine.pause("keep")

    def snapshot(self, version: int) -> Exposure:
        self.exposed.append(self.pool.snapshot(version))
        return self.exposed[-1]

    async def close(self) -> None:
        for exposure in self.exposed:
            self.pool.transport.release(exposure)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Of the whole module: its tests share one event loop, which is the engines'."""
    return "asyncio"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
async def pool(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    pool = Pool(model_dir, f"qg-vllm-{tmp_path_factory.mktemp('pool').name}-{os.getpid()}")
    yield pool
    await pool.close()


@pytest.fixture
async def bench(pool: Pool) -> AsyncIterator[VLLMBench]:
    made = VLLMBench(pool)
    yield made
    await made.close()


@pytest.fixture
def cell_bench(bench: VLLMBench) -> VLLMBench:
    return bench


@pytest.fixture
def model_bench(bench: VLLMBench) -> VLLMBench:
    return bench


async def test_tokens_and_logprobs_are_those_of_the_embedded_engine_over_publishes(pool: Pool):
    """Same draws, so the same tokens; log-probs as exact as float32 can be."""
    engine, errors = await pool.take(0), Errors()
    config = EngineConfig(max_context_tokens=contract.MAX_CONTEXT, kv_blocks=64)
    embedded = EmbeddedEngine(pool.model_dir, pool.transport, config)
    for version in range(3):
        snapshot = pool.snapshot(version)
        for each in (engine, embedded):
            await each.update_weights(snapshot, version)
        pool.transport.release(snapshot)
        for temperature in (1.0, 0.7, 0.0):
            asked = contract.request(f"{version}-{temperature}", max_tokens=60)
            asked = GenerateRequest(asked.request_id, asked.token_ids, Sampling(temperature, 60, (), version))
            ours, theirs = await contract.collect(engine.generate(asked)), await contract.collect(embedded.generate(asked))
            assert contract.tokens_of(ours) == contract.tokens_of(theirs)
            assert {chunk.version for chunk in ours} == {version}
            known = np.frombuffer(asked.token_ids, np.int32)
            row = Row(np.concatenate([known, np.array(contract.tokens_of(ours), np.int32)]), len(known), temperature)
            model = Qwen3(read_spec(pool.model_dir), tiny_parameters(pool.model_dir, seed=version))
            errors.add(model, row, np.array(logprobs_of(ours)))
    errors.assert_no_more_than_rounding()
    await embedded.close()


async def test_a_call_of_3000_tokens_moves_and_nothing_known_is_computed_again(pool: Pool):
    config = EngineConfig(engine="vllm", max_context_tokens=LONG, block_size=32, kv_blocks=300, max_running=2)
    source, destination = pool.start(config), pool.start(config)
    prompt = np.random.default_rng(5).integers(0, 96, 3000).astype(np.int32).tobytes()
    whole = GenerateRequest("long", prompt, Sampling(0.0, 200, (), 1))
    async with aclosing(source.generate(whole)) as stream:
        done = contract.tokens_of([await anext(stream)])
        await source.abort(["long"])
        done += contract.tokens_of([chunk async for chunk in stream])
    known = prompt + np.array(done, np.int32).tobytes()
    handle = await source.export_kv(known)
    assert handle is not None and handle.num_tokens == 3000 + len(done) - 1
    before = destination.stats()
    await destination.import_kv(handle)
    rest = await contract.collect(destination.generate(contract.continued("rest", whole, done)))
    after = destination.stats()
    assert rest[0].cached_tokens == handle.num_tokens
    assert after.tokens_prefilled - before.tokens_prefilled == 1
    assert after.tokens_imported - before.tokens_imported == handle.num_tokens
    assert done + contract.tokens_of(rest) == contract.tokens_of(await contract.collect(source.generate(whole)))
    await source.release(handle.handle_id)
    for each in (source, destination):
        await each.close()


async def test_a_head_that_keeps_old_weights_is_caught_and_serves_no_more(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    """vLLM's own reload leaves a tied head as it was on a CPU; `refresh_heads` renews it. Without it the probe must say so."""
    monkeypatch.setattr(transfer, "refresh_heads", lambda model: None)
    engine = pool.start()
    snapshot = pool.snapshot(1)
    with pytest.raises(EngineError, match="does not compute with the weights of version 1"):
        await engine.update_weights(snapshot, 1)
    with pytest.raises(EngineUnavailable):
        await contract.collect(engine.generate(contract.request("a")))
    pool.transport.release(snapshot)
    await engine.close()


async def test_a_tensor_that_no_loader_takes_is_named_and_nothing_is_served(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    """vLLM's loaders pass over a name that they do not know without a word, or fail, by the model: both are refused by name."""
    honest = transfer.as_in_folder

    def renamed(model: object, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = honest(model, weights)
        return {name.replace("layers.1.mlp.down_proj", "layers.1.mlp.other_proj"): array for name, array in found.items()}

    monkeypatch.setattr(transfer, "as_in_folder", renamed)
    engine = pool.start()
    snapshot = pool.snapshot(1)
    with pytest.raises(EngineError, match=r"layers\.1\.mlp"):
        await engine.update_weights(snapshot, 1)
    with pytest.raises(EngineUnavailable):
        await contract.collect(engine.generate(contract.request("a")))
    pool.transport.release(snapshot)
    await engine.close()


async def test_a_call_that_waits_for_its_first_token_during_a_publish_imports_nothing_old(pool: Pool):
    source, engine = await pool.take(0), await pool.take(1)
    whole = contract.request("a", prompt=100, max_tokens=40)
    await contract.collect(source.generate(whole))
    handle = await source.export_kv(whole.token_ids)
    assert handle is not None and await engine.import_kv(handle) == 100
    await engine.pause("keep")
    waiting = asyncio.create_task(contract.collect(engine.generate(whole)))
    await asyncio.sleep(0)
    snapshot = pool.snapshot(1)
    await engine.update_weights(snapshot, 1)
    await engine.resume()
    chunks = await waiting
    await source.update_weights(snapshot, 1)
    assert (chunks[0].cached_tokens, {chunk.version for chunk in chunks}) == (0, {1})
    assert contract.tokens_of(chunks) == contract.tokens_of(await contract.collect(source.generate(whole)))
    await source.release(handle.handle_id)
    pool.transport.release(snapshot)


async def test_calls_that_do_not_fit_together_wait_for_blocks_and_lose_nothing(pool: Pool):
    """Four calls of 250 tokens need 32 blocks; 12 are there, so vLLM preempts and computes again."""
    config = EngineConfig(engine="vllm", max_context_tokens=256, block_size=32, kv_blocks=13, max_running=4, stream_interval=3)
    engine, calm = pool.start(config), await pool.take(0)
    calls = [contract.request(f"c{index}", prompt=60 + index, max_tokens=180, seed=index) for index in range(4)]
    together = await asyncio.gather(*(contract.collect(engine.generate(call)) for call in calls))
    for call, chunks in zip(calls, together, strict=True):
        assert contract.tokens_of(chunks) == contract.tokens_of(await contract.collect(calm.generate(call)))
    await engine.close()


async def test_calls_of_an_engine_whose_process_is_killed_end_at_once_with_an_error(pool: Pool):
    engine = pool.start()
    async with aclosing(engine.generate(contract.request("a", max_tokens=200))) as stream:
        await anext(stream)
        os.kill(engine.core_pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="gone"):
            await contract.collect(stream)
    assert "gone" in engine.stats().failure
    with pytest.raises(EngineUnavailable, match="gone"):
        await engine.export_kv(contract.request("a").token_ids)
    assert "gone" in engine.stats().failure, "the cell is lost by it, and replaced"
    await engine.close()


async def test_an_engine_whose_process_stands_still_is_given_up_after_the_deadline(pool: Pool):
    config = msgspec.structs.replace(CONFIG, command_deadline_s=3.0)
    engine = pool.start()
    await contract.collect(engine.generate(contract.request("a", max_tokens=3)))
    engine._process.config = config
    stopped = engine.core_pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await engine.pause("keep")
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await contract.collect(engine.generate(contract.request("b")))
    os.kill(stopped, signal.SIGKILL)
    await engine.close()


async def test_a_snapshot_that_is_gone_changes_nothing(pool: Pool):
    engine = await pool.take(0)
    expected = contract.tokens_of(await contract.collect(engine.generate(contract.request("x", max_tokens=60))))
    snapshot = pool.snapshot(1)
    pool.transport.release(snapshot)
    async with aclosing(engine.generate(contract.request("a", max_tokens=60))) as stream:
        chunks = [await anext(stream)]
        with pytest.raises(StaleRead):
            await engine.update_weights(snapshot, 1)
        chunks += [chunk async for chunk in stream]
    assert contract.tokens_of(chunks) == expected
    assert {chunk.version for chunk in chunks} == {0}


def test_the_engine_ends_with_the_process_that_started_it(pool: Pool, tmp_path: Path):
    """A cell that is killed leaves nothing behind."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            asyncio.run(_start_and_say(pool, write))
        os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        core = int(pipe.readline())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert pipe.read() == b"", "the pipe is open as long as the engine's process lives"
    asyncio.run(wait_gone(core))


async def _start_and_say(pool: Pool, pipe: int) -> None:
    engine = pool.start()
    await contract.collect(engine.generate(contract.request("a", max_tokens=3)))
    os.write(pipe, f"{engine.core_pid}\n".encode())
    await asyncio.Event().wait()


def logprobs_of(chunks: list) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]
