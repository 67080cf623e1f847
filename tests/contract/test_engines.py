"""What every engine must do, whatever it is made of.

`bench` is of every engine, `cell_bench` of those over whose weights and memory a cell has a say, `model_bench` of those whose tokens follow
from the prompt and the seed, and whose KV is that of the prompt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable, KVRefused, StaleRead
from qwengyre.engines.api import CellEngine, GenerateRequest, Sampling, Serving, TokenChunk
from qwengyre.engines.completions import CompletionsEngine, open_http
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.engines.remote import RemoteEngine
from qwengyre.engines.server import EngineServer
from qwengyre.paced.engine import PacedEngine
from qwengyre.testing.completions_server import CompletionsServer
from qwengyre.testing.engines import ScriptedEngine, tiny_parameters, write_tiny_qwen3
from qwengyre.testing.families import moved_parameters, write_family
from qwengyre.testing.paced import PLAN
from qwengyre.testing.tokenizers import byte_tokenizer
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.shm import ShmTransport, cleanup

FAMILIES = ("llama", "gemma3_text", "qwen3_5_text", "qwen3_moe", "deepseek_v3")
"""Embedded, by transformers' own forward: dense, sliding windows, hybrid, mixture, latent attention."""
MAX_CONTEXT, VOCABULARY = 256, 96
SECRET = b"contract"
LATE_ABORTS = 20
"""On a busy machine a whole call may be over before its abort comes: then it is tried again."""
DEVICE = os.environ.get("QWENGYRE_TEST_DEVICE", "cpu")
"""`make test-gpu` holds the embedded engine on a device to the same contract."""
CELL_SIDE: dict[str, type[Serving]] = {
    "embedded": EmbeddedEngine,
    "scripted": ScriptedEngine,
    "remote": EmbeddedEngine,
    **dict.fromkeys(FAMILIES, EmbeddedEngine),
    "paced": PacedEngine,
    "completions": CompletionsEngine,
}
"""The engine that a cell has; it is the one that the gateway talks to as well, but for `remote`."""
OF_A_CELL = [kind for kind, engine in CELL_SIDE.items() if issubclass(engine, CellEngine)]
OF_A_MODEL = [kind for kind in OF_A_CELL if kind != "paced"]
"""What a paced engine says, its plan says."""
CONFIG = EngineConfig(
    max_running=4, max_context_tokens=MAX_CONTEXT, kv_blocks=64, prefill_chunk=24, stream_interval=3, command_deadline_s=30
)


class Bench:
    """Makes engines of one kind, and the snapshots that they read."""

    cache_tokens = 1
    """The engines' own prefix cache finds multiples of this."""

    def __init__(self, kind: str, model_dir: Path, prefix: str):
        self.kind, self.model_dir = kind, model_dir
        self.transport = ShmTransport(prefix)
        self._stack = AsyncExitStack()
        self._behind: dict[Serving, CellEngine] = {}

    async def engine(self, *, holds: bool = False) -> Serving:
        """With `holds`, a completions server waits after its first token: there is nobody else to hold a call there."""
        engine = await self._make(holds)
        self._stack.push_async_callback(engine.close)
        return await self._served_to_others(engine) if self.kind == "remote" else engine

    def cell(self, engine: Serving) -> CellEngine:
        """The engine as its cell has it."""
        return self._behind.get(engine, engine)

    async def hold(self, engine: Serving) -> None:
        """No more tokens; see `holds`."""
        if self.kind in OF_A_CELL:
            await self.cell(engine).pause("keep")

    async def _make(self, holds: bool) -> Serving:
        if self.kind == "scripted":
            return ScriptedEngine(transport=self.transport, max_context_tokens=MAX_CONTEXT, tokens_per_chunk=3)
        if self.kind == "paced":
            many = msgspec.structs.replace(CONFIG, max_running=16)  # its calls never wait: one too many is refused
            return PacedEngine(PLAN, byte_tokenizer(), self.transport, many)
        if self.kind == "completions":
            server = CompletionsServer(lambda prompt: range(1, MAX_CONTEXT), max_model_len=MAX_CONTEXT, held=holds)
            await self._stack.enter_async_context(server)
            return CompletionsEngine(open_http(server.url), "policy", max_context_tokens=MAX_CONTEXT)
        return EmbeddedEngine(self.model_dir, self.transport, msgspec.structs.replace(CONFIG, device=DEVICE))

    async def _served_to_others(self, engine: CellEngine) -> RemoteEngine:
        server = EngineServer(engine, secret=SECRET)
        address = await server.serve("tcp://127.0.0.1:0")
        self._stack.push_async_callback(server.close)
        remote = RemoteEngine(address, secret=SECRET, deadline_s=30)
        await remote.connect()
        self._stack.push_async_callback(remote.close)
        self._behind[remote] = engine
        return remote

    def snapshot(self, version: int) -> Exposure:
        made = moved_parameters if self.kind in FAMILIES else tiny_parameters
        return self.transport.expose(made(self.model_dir, seed=version), version=version, incarnation=1)

    async def close(self) -> None:
        await self._stack.aclose()
        self.transport.close()


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind's model, written once."""

    @cache
    def folder(family: str) -> Path:
        made = tmp_path_factory.mktemp("model")
        if not family:
            return write_tiny_qwen3(made)
        write_family(made, family, vocab_size=VOCABULARY)
        return made

    return lambda kind: folder(kind if kind in FAMILIES else "")


def _bench_of(kinds: Iterable[str]) -> Callable:
    @pytest.fixture(params=kinds)
    async def bench(request: pytest.FixtureRequest, model_dirs: Callable[[str], Path], prefix: str) -> AsyncIterator[Bench]:
        made = Bench(request.param, model_dirs(request.param), prefix)
        yield made
        await made.close()
        assert cleanup(prefix) == 0, "an engine left exposed memory behind"

    return bench


bench, cell_bench, model_bench = _bench_of(CELL_SIDE), _bench_of(OF_A_CELL), _bench_of(OF_A_MODEL)


def named(name: str) -> str:
    """A request id: calls of one execution, which the plan of a paced engine knows."""
    return f"e000000-0/c0#{name}"


def request(name: str, *, prompt: int = 40, max_tokens: int = 20, seed: int = 7, stop: tuple[int, ...] = ()) -> GenerateRequest:
    tokens = np.random.default_rng(prompt).integers(0, VOCABULARY, prompt).astype(np.int32)
    return GenerateRequest(named(name), tokens.tobytes(), Sampling(1.0, max_tokens, stop, seed))


def continued(name: str, whole: GenerateRequest, done: list[int]) -> GenerateRequest:
    """The rest of `whole`, of which `done` is known."""
    sampling = whole.sampling
    rest = Sampling(sampling.temperature, sampling.max_tokens - len(done), sampling.stop_token_ids, sampling.seed, len(done))
    return GenerateRequest(named(name), whole.token_ids + np.array(done, np.int32).tobytes(), rest)


async def collect(stream: AsyncGenerator[TokenChunk, None]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_a_stream_ends_once_with_length_and_every_token_has_a_logprob(bench):
    engine = await bench.engine()
    chunks = await collect(engine.generate(request("a", max_tokens=6)))
    assert len(tokens_of(chunks)) == 6
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for chunk in chunks:
        assert (chunk.request_id, chunk.version) == (named("a"), 0)
        assert len(chunk.logprobs) == len(chunk.token_ids)
        assert all(logprob <= 0 for logprob in chunk.logprobs)


async def test_a_sampled_stop_token_is_part_of_the_output_and_ends_it(model_bench):
    engine = await model_bench.engine()
    whole = tokens_of(await collect(engine.generate(request("a"))))
    stop = whole[9]
    chunks = await collect(engine.generate(request("b", stop=(stop,))))
    assert tokens_of(chunks) == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish_reason == "stop"


async def test_the_same_call_gives_the_same_tokens_in_any_company(model_bench):
    engine, other = await model_bench.engine(), await model_bench.engine()
    alone = tokens_of(await collect(engine.generate(request("a"))))
    company = [request(f"b{index}", prompt=30 + 11 * index, seed=index) for index in range(6)]
    together = await asyncio.gather(*(collect(other.generate(one)) for one in [*company, request("a")]))
    assert tokens_of(together[-1]) == alone


async def test_another_seed_gives_other_tokens(model_bench):
    engine = await model_bench.engine()
    one = tokens_of(await collect(engine.generate(request("a", seed=1))))
    assert one != tokens_of(await collect(engine.generate(request("b", seed=2))))


async def test_a_continuation_draws_what_the_whole_call_would_have_drawn(model_bench):
    engine, other = await model_bench.engine(), await model_bench.engine()
    whole = request("a", max_tokens=24)
    expected = tokens_of(await collect(engine.generate(whole)))
    rest = await collect(other.generate(continued("b", whole, expected[:10])))
    assert tokens_of(rest) == expected[10:]


async def test_an_abort_ends_with_the_partial_tokens(bench):
    engine = await bench.engine(holds=True)
    whole = request("a", max_tokens=200)
    expected = tokens_of(await collect((await bench.engine()).generate(whole)))
    for _ in range(LATE_ABORTS):
        async with aclosing(engine.generate(whole)) as stream:
            chunks = [await anext(stream)]
            await engine.abort([named("a"), "unknown"])
            chunks += [chunk async for chunk in stream]
        if chunks[-1].finish_reason == "abort":
            break
        assert tokens_of(chunks) == expected, "an abort that came too late changes nothing"
    assert chunks[-1].finish_reason == "abort"
    partial = tokens_of(chunks)
    assert 0 < len(partial) < len(expected)
    assert partial == expected[: len(partial)]
    assert engine.capacity().running == 0


async def test_pause_keep_makes_no_token_until_resume(model_bench):
    engine = await model_bench.engine()
    expected = tokens_of(await collect(engine.generate(request("x", max_tokens=200))))
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        chunks = [await anext(stream)]
        await model_bench.cell(engine).pause("keep")
        await engine.release("unknown")
        before = engine.stats().tokens_generated
        for _ in range(5):
            await engine.release("unknown")
        assert engine.stats().tokens_generated == before
        await model_bench.cell(engine).resume()
        chunks += [chunk async for chunk in stream]
    assert tokens_of(chunks) == expected


async def test_pause_abort_ends_every_call(cell_bench):
    engine = await cell_bench.engine()
    for _ in range(LATE_ABORTS):
        streams = [asyncio.create_task(collect(engine.generate(request(f"a{index}", max_tokens=200)))) for index in range(6)]
        async with aclosing(engine.generate(request("last", max_tokens=200))) as stream:
            chunks = [await anext(stream)]
            await cell_bench.cell(engine).pause("abort")
            chunks += [chunk async for chunk in stream]
        assert {(await task)[-1].finish_reason for task in streams} <= {"abort", "length", "stop"}
        if chunks[-1].finish_reason == "abort":
            break
        assert len(tokens_of(chunks)) == 200, "a pause that came too late changes nothing"
        await cell_bench.cell(engine).resume()
    assert chunks[-1].finish_reason == "abort"


async def test_a_publish_never_lies_inside_a_chunk(cell_bench):
    engine = await cell_bench.engine()
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        chunks = [await anext(stream)]
        await cell_bench.cell(engine).pause("keep")
        await cell_bench.cell(engine).update_weights(cell_bench.snapshot(1), 1)
        await cell_bench.cell(engine).resume()
        chunks += [chunk async for chunk in stream]
    versions = [chunk.version for chunk in chunks if chunk.token_ids]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert chunks[-1].finish_reason in ("length", "stop")


async def test_running_calls_are_computed_again_at_a_publish(model_bench):
    engine = await model_bench.engine()
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        chunks = [await anext(stream)]
        await model_bench.cell(engine).pause("keep")
        await model_bench.cell(engine).update_weights(model_bench.snapshot(1), 1)
        await model_bench.cell(engine).resume()
        chunks += [chunk async for chunk in stream]
    assert len(tokens_of(chunks)) == 200
    assert engine.stats().tokens_recomputed_at_publish >= 40


async def test_a_call_moves_with_its_kv_and_goes_on_as_if_nothing_had_happened(model_bench):
    source, destination = await model_bench.engine(), await model_bench.engine()
    whole = request("a", prompt=50, max_tokens=150)
    expected = tokens_of(await collect((await model_bench.engine()).generate(whole)))
    done = tokens_of(await collect(source.generate(request("a", prompt=50, max_tokens=60))))
    handle = await source.export_kv(continued("b", whole, done).token_ids)
    assert handle is not None
    await model_bench.cell(source).offload()
    before = destination.stats()
    await destination.import_kv(handle)
    rest = await collect(destination.generate(continued("b", whole, done)))
    await source.release(handle.handle_id)
    assert done + tokens_of(rest) == expected
    known = 50 + len(done)
    assert handle.num_tokens == known - 1
    assert rest[0].cached_tokens == known - 1
    await destination.release("unknown")
    after = destination.stats()
    assert after.tokens_prefilled - before.tokens_prefilled <= 1
    assert after.tokens_imported - before.tokens_imported == known - 1


async def test_kv_of_another_version_is_refused_and_computed_again(model_bench):
    source, destination = await model_bench.engine(), await model_bench.engine()
    await collect(source.generate(request("a", max_tokens=2)))
    handle = await source.export_kv(request("a").token_ids)
    assert handle is not None
    await model_bench.cell(destination).update_weights(model_bench.snapshot(1), 1)
    with pytest.raises(KVRefused):
        await destination.import_kv(handle)
    chunks = await collect(destination.generate(request("b", max_tokens=2)))
    assert chunks[0].cached_tokens == 0
    assert len(tokens_of(chunks)) == 2


async def test_kv_of_another_model_dtype_or_layout_is_refused_and_computed_again(model_bench):
    source, destination = await model_bench.engine(), await model_bench.engine()
    expected = tokens_of(await collect(source.generate(request("a", max_tokens=2))))
    handle = await source.export_kv(request("a").token_ids)
    assert handle is not None
    foreign = msgspec.structs.replace(handle, fingerprint="another")
    with pytest.raises(KVRefused):
        await destination.import_kv(foreign)
    before = destination.stats()
    chunks = await collect(destination.generate(request("b", max_tokens=2)))
    await destination.release("unknown")
    assert tokens_of(chunks) == expected
    assert chunks[0].cached_tokens == 0
    assert destination.stats().tokens_imported == before.tokens_imported
    assert destination.stats().tokens_prefilled - before.tokens_prefilled == 40


async def test_released_kv_cannot_be_read(model_bench):
    source, destination = await model_bench.engine(), await model_bench.engine()
    await collect(source.generate(request("a", max_tokens=2)))
    handle = await source.export_kv(request("a").token_ids)
    assert handle is not None
    await source.release(handle.handle_id)
    await source.release(handle.handle_id)
    with pytest.raises(StaleRead):
        await destination.import_kv(handle)


async def test_nothing_is_exported_of_what_was_never_computed(model_bench):
    engine = await model_bench.engine()
    assert await engine.export_kv(request("a").token_ids) is None
    await collect(engine.generate(request("a", max_tokens=2)))
    await model_bench.cell(engine).update_weights(model_bench.snapshot(1), 1)
    assert await engine.export_kv(request("a").token_ids) is None


async def test_the_next_turn_finds_its_prefix(model_bench):
    engine = await model_bench.engine()
    first = request("a", prompt=50, max_tokens=9)
    known = first.token_ids + np.array(tokens_of(await collect(engine.generate(first))), np.int32).tobytes()
    longer = GenerateRequest(named("b"), known + np.arange(5, dtype=np.int32).tobytes(), first.sampling)
    chunks = await collect(engine.generate(longer))
    assert chunks[0].cached_tokens == 58 // model_bench.cache_tokens * model_bench.cache_tokens


async def test_a_prompt_beyond_the_context_is_refused(bench):
    engine = await bench.engine()
    with pytest.raises(ContextOverflow) as caught:
        await collect(engine.generate(request("a", prompt=MAX_CONTEXT)))
    assert (caught.value.num_tokens, caught.value.max_tokens) == (MAX_CONTEXT, MAX_CONTEXT - 1)
    chunks = await collect(engine.generate(request("b", prompt=MAX_CONTEXT - 3, max_tokens=50)))
    assert (len(tokens_of(chunks)), chunks[-1].finish_reason) == (3, "length")


async def test_an_offloaded_engine_serves_again_after_restore(cell_bench):
    engine, other = await cell_bench.engine(), await cell_bench.engine()
    await cell_bench.cell(engine).offload()
    await cell_bench.cell(engine).offload()
    with pytest.raises(EngineUnavailable):
        await collect(engine.generate(request("a")))
    await cell_bench.cell(engine).restore(cell_bench.snapshot(3), 3)
    await cell_bench.cell(other).update_weights(cell_bench.snapshot(3), 3)
    chunks = await collect(engine.generate(request("a")))
    assert {chunk.version for chunk in chunks} == {3}
    assert tokens_of(chunks) == tokens_of(await collect(other.generate(request("a"))))


async def test_offload_is_refused_while_a_call_runs(cell_bench):
    engine = await cell_bench.engine()
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        await anext(stream)
        await cell_bench.cell(engine).pause("keep")
        with pytest.raises(EngineError):
            await cell_bench.cell(engine).offload()


async def test_a_reader_that_goes_away_frees_its_call(bench):
    engine = await bench.engine()
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        await anext(stream)
    await engine.release("unknown")
    assert engine.capacity().running == 0


async def test_an_id_may_be_used_again_at_once(bench):
    engine = await bench.engine()
    expected = tokens_of(await collect(engine.generate(request("x", max_tokens=60))))
    for _ in range(4):
        async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
            await anext(stream)
        assert tokens_of(await collect(engine.generate(request("a", max_tokens=60)))) == expected


async def test_a_request_id_runs_once(bench):
    engine = await bench.engine()
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        await anext(stream)
        with pytest.raises(EngineUnavailable):
            await collect(engine.generate(request("a")))


async def test_close_ends_waiting_calls_with_an_error(bench):
    engine = await bench.engine(holds=True)
    async with aclosing(engine.generate(request("a", max_tokens=200))) as stream:
        await anext(stream)
        await bench.hold(engine)
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await collect(stream)


async def test_engines_of_one_model_share_a_fingerprint(model_bench):
    handles = []
    for engine in (await model_bench.engine(), await model_bench.engine()):
        await collect(engine.generate(request("a", max_tokens=2)))
        handles.append(await engine.export_kv(request("a").token_ids))
    assert len({handle.fingerprint for handle in handles}) == 1
