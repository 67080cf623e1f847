"""The engine that only takes time: its script, its streams, its moves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from qwengyre.core.errors import ConfigError, ContextOverflow, EngineError, EngineUnavailable, KVRefused
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.paced.engine import PacedEngine
from qwengyre.paced.plan import PacedPlan
from qwengyre.testing.paced import PLAN
from qwengyre.testing.tokenizers import byte_tokenizer
from qwengyre.transfer.shm import ShmTransport, cleanup

FAST = msgspec.structs.replace(PLAN, executions_s=[[0.05, 5000.0]], num_calls=2)
PROMPT = np.arange(30, dtype=np.int32)


def request(name: str, *, done: list[int] | None = None, max_tokens: int = 64) -> GenerateRequest:
    done = done or []
    ids = np.concatenate([PROMPT, np.array(done, np.int32)]).astype(np.int32)
    return GenerateRequest(name, ids.tobytes(), Sampling(1.0, max_tokens, (), 0, len(done)))


@pytest.fixture
def engine(prefix):
    transport = ShmTransport(prefix)

    def make(max_running: int = 4) -> PacedEngine:
        config = EngineConfig(engine="paced", paced_plan="plan.json", max_running=max_running, max_context_tokens=128)
        return PacedEngine(FAST, byte_tokenizer(), transport, config)

    yield make
    transport.close()
    assert cleanup(prefix) == 0


async def answer(engine: PacedEngine, asked: GenerateRequest) -> tuple[list[int], list[str | None]]:
    chunks = [chunk async for chunk in engine.generate(asked)]
    return [token for chunk in chunks for token in chunk.token_ids], [chunk.finish_reason for chunk in chunks]


class TestPlan:
    def test_calls_share_the_execution_and_the_last_one_ends_it(self):
        calls = [FAST.call(f"e000000-1/c{number}#0") for number in range(2)]
        assert [(call.decode_s, call.until_s, call.is_last) for call in calls] == [
            (1250.0, 2500.0, False),
            (1250.0, 5000.0, True),
        ]
        assert [call.text for call in calls] == ["on 2500.000", "end 5000.000"]

    def test_later_attempts_have_the_same_script(self):
        assert FAST.call("e000000-1/a2c1#3") == FAST.call("e000000-1/c1#0")

    @pytest.mark.parametrize("name", ["e000001-0/c0", "e000000-2/c0", "title"])
    def test_unknown_execution(self, name):
        with pytest.raises(ConfigError, match="no execution"):
            FAST.call(name)

    def test_file_that_is_no_plan(self, tmp_path):
        (tmp_path / "plan.json").write_text("{}")
        with pytest.raises(ConfigError, match="cannot be read"):
            PacedPlan.read(str(tmp_path / "plan.json"))

    def test_engine_and_plan_belong_together(self):
        for wrong in ({"engine": "paced"}, {"paced_plan": "plan.json"}):
            with pytest.raises(ValueError, match="paced_plan"):
                EngineConfig(**wrong)


def test_tokenizer_without_the_end_of_a_reply_is_refused(prefix):
    config = EngineConfig(engine="paced", paced_plan="plan.json")
    with pytest.raises(EngineError, match=r"<\|im_end\|>, which the tokenizer of this policy lacks"):
        PacedEngine(FAST, Tokenizer(BPE()), ShmTransport(prefix), config)


class TestStream:
    async def test_says_what_the_plan_says_and_stops(self, engine):
        tokens, reasons = await answer(engine(), request("e000000-0/c0#0"))
        assert byte_tokenizer().decode(tokens, skip_special_tokens=False) == "on 0.025<|im_end|>"
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]

    async def test_continuation_says_the_rest(self, engine):
        made = engine()
        whole, _ = await answer(made, request("e000000-0/c1#0"))
        rest, reasons = await answer(made, request("e000000-0/c1#1", done=whole[:3]))
        assert whole[:3] + rest == whole
        assert reasons[-1] == "stop"

    async def test_limit_of_tokens(self, engine):
        tokens, reasons = await answer(engine(), request("e000000-0/c0#0", max_tokens=4))
        assert len(tokens) == 4
        assert reasons[-1] == "length"

    async def test_abort_ends_a_stream_with_what_there_is(self, engine):
        made = engine()
        async with aclosing(made.generate(request("e000000-1/c0#0"))) as stream:
            coming = asyncio.ensure_future(anext(stream))
            while not made.capacity().running:
                await asyncio.sleep(0)
            await made.abort(["e000000-1/c0#0"])
            last = await coming
        assert (last.finish_reason, last.token_ids) == ("abort", ())
        assert made.capacity().running == 0

    async def test_more_calls_than_it_serves_are_refused(self, engine):
        made = engine(max_running=1)
        async with aclosing(made.generate(request("e000000-1/c0#0"))) as stream:
            coming = asyncio.ensure_future(anext(stream))
            while not made.capacity().running:
                await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="max_running"):
                await answer(made, request("e000000-0/c0#0"))
            with pytest.raises(EngineError, match="abort them first"):
                await made.offload()
            await made.close()
            with pytest.raises(EngineUnavailable, match="closed"):
                await coming

    async def test_prompt_over_the_context(self, engine):
        with pytest.raises(ContextOverflow):
            await answer(engine(), request("e000000-0/c0#0", done=[1] * 100))


class TestMoves:
    async def test_kv_goes_along_and_counts_as_cached(self, engine):
        source, destination = engine(), engine()
        handle = await source.export_kv(PROMPT.tobytes())
        assert await destination.import_kv(handle) == len(PROMPT)
        chunks = [chunk async for chunk in destination.generate(request("e000000-0/c0#1", done=[1, 2]))]
        assert chunks[0].cached_tokens == destination.stats().tokens_cached == len(PROMPT)
        assert destination.stats().tokens_imported == len(PROMPT)
        await source.release(handle.handle_id)

    async def test_kv_of_another_version_is_refused(self, engine):
        source, destination = engine(), engine()
        handle = await source.export_kv(PROMPT.tobytes())
        with pytest.raises(KVRefused):
            await destination.import_kv(msgspec.structs.replace(handle, version=5))
        await source.close()

    async def test_offloaded_it_serves_nothing_and_restored_it_has_the_version(self, engine, prefix):
        made = engine()
        transport = ShmTransport(prefix)
        snapshot = transport.expose({"weights": np.zeros(4, np.float32)}, version=3, incarnation=0)
        await made.offload()
        with pytest.raises(EngineUnavailable, match="offloaded"):
            await answer(made, request("e000000-0/c0#0"))
        await made.restore(snapshot, 3)
        chunks = [chunk async for chunk in made.generate(request("e000000-0/c0#0"))]
        assert {chunk.version for chunk in chunks} == {3}
        transport.close()
