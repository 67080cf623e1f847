"""Clients are kept alive in their own dialect, cuts lose nothing, retries resample nothing."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from qwengyre.core.errors import EngineError, EngineUnavailable, JournalFull
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.control_api import MoveCalls
from qwengyre.gateway.gateway import CONCURRENT_ENCODINGS
from qwengyre.gateway.moves import move
from qwengyre.gateway.session import LARGE_CHARS
from qwengyre.testing.asgi_client import begin
from qwengyre.testing.engines import ScriptedEngine
from tests.clock import put_forward

SAID = "one two three four<|im_end|>"
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500},
    "/v1/responses": {"input": [{"type": "message", "role": "user", "content": "hi"}], "stream": True},
}
KEEP_ALIVE = {
    "/v1/chat/completions": b'"delta":{"content":""}',
    "/v1/messages": b"event: ping",
    "/v1/responses": b"response.in_progress",
}
TERMINAL = {"/v1/chat/completions": b"data: [DONE]", "/v1/messages": b"message_stop", "/v1/responses": b"response.completed"}


def ask(bench, execution, path, **changes):
    body = json.dumps({**BODIES[path], **changes}).encode()
    return begin(bench.harness_app, "POST", path, headers={"x-api-key": execution.keys.key}, body=body)


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0)


def has_shown(call, num_tokens: int) -> bool:
    answer = call.answer
    return call.num_answer == num_tokens and all(reader.position == len(answer.deltas) for reader in answer.readers)


@pytest.fixture
def impatient(bench):
    """Headers at once, and a sign of life whenever the clock of the bench (a second a look) allows."""
    bench.gateway.config = GatewayConfig(headers_after_s=0.0, keep_alive_s=1.0, max_context_tokens=100_000)
    return bench


@pytest.mark.parametrize("path", BODIES)
async def test_held_stream_hears_its_own_dialect(impatient, path):
    bench = impatient

    async with bench.running():
        execution = await bench.open()
        waking = asyncio.ensure_future(bench.harness_app.keep_alive(0.001))
        exchange = ask(bench, execution, path)
        await exchange.wait_until(lambda got: got.body.count(KEEP_ALIVE[path]) >= 3)
        assert TERMINAL[path] not in exchange.body
        await bench.gateway.set_server("cell-0", bench.says(SAID))
        execution.route.set("cell-0")
        await exchange.finish()
        waking.cancel()
        assert TERMINAL[path] in exchange.body
        assert exchange.status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_retry_of_a_cut_call_goes_on_with_its_tokens(bench, path):
    async with bench.running():
        engine = bench.says(SAID, held=True)
        execution = await bench.open(engine=engine)
        cut = ask(bench, execution, path)
        await engine.grant("e000001-0/c0#1", 7)
        await until(lambda: execution.live and has_shown(execution.live[0], 7))
        await cut.hang_up()
        await engine.grant("e000001-0/c1#1", 100)
        again = await ask(bench, execution, path, stream=False).finish()
        assert b"one two three four" in again.body
        assert engine.requests[1].sampling.first_index == 7
        calls = await bench.gateway.close(execution.id)
        assert bench.text(calls.answer_ids(1)) == SAID
        assert [call.finished.abandoned for call in calls] == [True, False]


async def test_whole_answer_that_nobody_heard_is_given_again_without_the_engine(bench):
    async with bench.running():
        engine = bench.says(SAID, tokens_per_chunk=100)
        execution = await bench.open(engine=engine)
        path = "/v1/chat/completions"
        first = ask(bench, execution, path)
        await until(lambda: execution.live and execution.live[0].tokens.num_sampled)
        execution.live[0].detach(next(iter(execution.live[0].answer.readers)))
        await first.hang_up()
        again = await ask(bench, execution, path).finish()
        assert b"four" in again.body and len(engine.requests) == 1


async def test_answered_context_asked_again_is_sampled_anew(bench):
    async with bench.running():
        engine = ScriptedEngine(lambda request: bench.ids(f"{request.sampling.seed}<|im_end|>"), max_context_tokens=9000)
        execution = await bench.open(engine=engine)
        answers = [(await ask(bench, execution, "/v1/chat/completions", stream=False).finish()).body for _ in range(3)]
        assert len({json.loads(body)["choices"][0]["message"]["content"] for body in answers}) == 3
        calls = await bench.gateway.close(execution.id)
        assert [call.started.base for call in calls] == [-1, 0, 0]
        assert [call.started.cause for call in calls] == ["root", "retry", "retry"]


async def test_seed_does_not_depend_on_the_order_of_arrival(make_bench):
    async def seeds(bench, execution: str, texts: list[str]) -> dict[str, int]:
        async with bench.running():
            engine = ScriptedEngine(lambda request: bench.ids("x<|im_end|>"), max_context_tokens=9000)
            opened = await bench.open(execution, engine=engine)
            for text in texts:
                body = {"messages": [{"role": "user", "content": text}], "stream": False}
                await ask(bench, opened, "/v1/chat/completions", **body).finish()
            return dict(zip(texts, [request.sampling.seed for request in engine.requests], strict=True))

    one, again = [await seeds(make_bench(), "e1", order) for order in (["a", "b", "c"], ["c", "a", "b"])]
    other = await seeds(make_bench(), "e2", ["a", "b", "c"])
    assert one == again
    assert len({*one.values(), *other.values()}) == 6


class DyingEngine(ScriptedEngine):
    """Is gone after `left` tokens."""

    left = 6

    async def generate(self, request):
        async for chunk in super().generate(request):
            self.left -= 1
            if self.left < 0:
                raise EngineUnavailable("the cell was killed")
            yield chunk


async def test_engine_that_dies_in_mid_answer_is_not_noticed(bench):
    async with bench.running():
        dying = DyingEngine(lambda request: bench.ids(SAID)[request.sampling.first_index :], max_context_tokens=9000)
        execution = await bench.open(engine=dying)
        exchange = ask(bench, execution, "/v1/messages")
        await until(lambda: dying.left < 0)
        other = ScriptedEngine(lambda request: bench.ids(SAID)[request.sampling.first_index :], max_context_tokens=9000)
        await bench.gateway.set_server("cell-1", other)
        execution.route.set("cell-1")
        await exchange.finish()
        assert b"message_stop" in exchange.body and b"error" not in exchange.body
        assert other.requests[0].sampling.first_index == 6
        calls = await bench.gateway.close(execution.id)
        assert bench.text(calls.answer_ids(0)) == SAID


class GoneEngine(ScriptedEngine):
    """Is registered, and never answers."""

    async def generate(self, request):
        raise EngineUnavailable("nobody listens there")
        yield


async def test_server_that_never_works_ends_the_call_at_the_deadline(bench):
    async with bench.running():
        execution = await bench.open(engine=GoneEngine())
        bench.gateway.max_hold_s = 50.0
        exchange = ask(bench, execution, "/v1/chat/completions", stream=False)
        while not exchange.is_done:
            execution.route.touch()
            await asyncio.sleep(0)
        assert exchange.status == 503 and b"no server took this call within 50 s" in exchange.body


class NoExport(ScriptedEngine):
    """Cannot hand out its KV, whatever the reason."""

    def __init__(self, script, reason: Exception):
        super().__init__(script, max_context_tokens=9000, held=True)
        self._reason_to_refuse = reason

    async def export_kv(self, token_ids):
        raise self._reason_to_refuse


@pytest.mark.parametrize("reason", [EngineError("out of handles"), EngineUnavailable("gone"), RuntimeError("a bug")])
async def test_move_whose_kv_cannot_be_carried_still_moves_the_call(bench, reason):
    async with bench.running():
        source = NoExport(lambda request: bench.ids(SAID), reason)
        execution = await bench.open(engine=source)
        other = ScriptedEngine(lambda request: bench.ids(SAID)[request.sampling.first_index :], max_context_tokens=9000)
        await bench.gateway.set_server("cell-1", other)
        exchange = ask(bench, execution, "/v1/chat/completions")
        await source.grant("e000001-0/c0#1", 5)
        await until(lambda: execution.live and has_shown(execution.live[0], 5))
        moving = await asyncio.gather(move(bench.gateway, MoveCalls("cell-0", {execution.id: "cell-1"})), return_exceptions=True)
        assert isinstance(moving[0], Exception) == isinstance(reason, RuntimeError)
        await exchange.finish()
        assert exchange.status == 200 and b"[DONE]" in exchange.body and b"error" not in exchange.body


class Hangs(ScriptedEngine):
    """Its heart beats and its thread does not come back: no export ever ends, however much time passes."""

    async def export_kv(self, token_ids):
        put_forward(60.0)
        await asyncio.Event().wait()


async def test_move_off_an_engine_that_hangs_ends_at_its_deadline_and_still_moves_the_call(bench):
    async with bench.running():
        source = Hangs(lambda request: bench.ids(SAID), max_context_tokens=9000, held=True)
        execution = await bench.open(engine=source)
        other = ScriptedEngine(lambda request: bench.ids(SAID)[request.sampling.first_index :], max_context_tokens=9000)
        await bench.gateway.set_server("cell-1", other)
        exchange = ask(bench, execution, "/v1/chat/completions")
        await source.grant("e000001-0/c0#1", 5)
        await until(lambda: execution.live and has_shown(execution.live[0], 5))
        moved = await move(bench.gateway, MoveCalls("cell-0", {execution.id: "cell-1"}, deadline_s=60.0))
        assert (moved.calls_moved, moved.contexts_moved) == (1, 0)
        await exchange.finish()
        assert exchange.status == 200 and b"[DONE]" in exchange.body and b"error" not in exchange.body


async def test_a_close_keeps_the_last_tokens_of_running_calls(bench):
    async with bench.running():
        engine = bench.says(SAID, held=True)
        execution = await bench.open(engine=engine)
        exchange = ask(bench, execution, "/v1/chat/completions")
        await engine.grant("e000001-0/c0#1", 5)
        await until(lambda: execution.live and execution.live[0].tokens.num_sampled == 5)
        calls = await bench.gateway.close(execution.id)
        await exchange.finish()
        assert calls[0].finished.abandoned and calls[0].finished.num_sampled == 5
        assert (bench.gateway.stats.server_errors, bench.gateway.stats.closed_while_waiting) == (0, 1)
        assert b"closed" in exchange.body


async def test_a_call_whose_execution_is_closed_while_its_long_prompt_is_encoded_starts_nothing(bench):
    """It would be served and recorded behind the close, out of the reach of routes, moves and cuts."""
    is_closed = threading.Event()

    async with bench.running():
        bench.gateway.config = GatewayConfig(max_context_tokens=1_000_000)
        engine = ScriptedEngine(lambda request: bench.ids(SAID), max_context_tokens=1_000_000)
        execution = await bench.open(engine=engine)
        execution.session.encode_ahead = lambda request, matched: is_closed.wait()
        messages = [{"role": "user", "content": "word " * (LARGE_CHARS // 4)}]
        exchange = ask(bench, execution, "/v1/chat/completions", messages=messages)
        await until(lambda: bench.gateway._encoding._value < CONCURRENT_ENCODINGS)
        calls = await bench.gateway.close(execution.id)
        is_closed.set()
        await exchange.finish()
        assert exchange.status == 401 and not execution.live and not len(calls)


async def test_a_gateway_that_stops_starts_no_call(bench):
    """Nobody would run it: its client would wait for an answer that never comes."""
    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID))
        bench.stop.set()
        exchange = await ask(bench, execution, "/v1/chat/completions", stream=False).finish()
        assert exchange.status == 503 and b"is stopping" in exchange.body
        assert not execution.live and not len(execution.session.calls)


class FullJournal:
    """Has room for `left` more records."""

    policy = "os"
    position = 0

    def __init__(self, left: int):
        self._left = left

    def append(self, record):
        self._left -= 1
        if self._left < 0:
            raise JournalFull("gateway.journal", num_bytes=1, reason="no space left on device")
        return self.position


@pytest.mark.parametrize("left", [0, 1, 3, 20])
async def test_full_disk_stops_the_gateway_and_tells_the_client(bench, left):
    async with bench.running():
        execution = await bench.open(engine=bench.says(SAID))
        bench.gateway._journal = FullJournal(left)
        exchange = await ask(bench, execution, "/v1/chat/completions", stream=False).finish()
        assert exchange.status == 500 and b"no space left" in exchange.body
        assert bench.stop.is_set() and "no space left" in str(bench.gateway.broken)
