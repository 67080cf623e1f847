"""What one execution may have at once: bytes of unfinished bodies, requests that are read or counted, one turn at a time."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from qwengyre.gateway import app
from qwengyre.gateway.budget import BURST_S, FREE_S, SHARE, Budget
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.protocol.fields import InvalidRequest
from qwengyre.gateway.protocol.messages import MessagesDialect
from qwengyre.gateway.session import LARGE_CHARS
from qwengyre.testing.asgi_client import begin

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def body(text: str = "hi") -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 9}).encode()


def post(bench, execution, path: str, data: bytes):
    return begin(bench.harness_app, "POST", path, headers={"x-api-key": execution.keys.key}, body=data)


class Upload:
    """A body that arrives in parts, and never ends by itself."""

    def __init__(self, bench, execution):
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.status = 0
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "query_string": b"",
            "headers": [(b"x-api-key", execution.keys.key.encode())],
        }
        self.task = asyncio.ensure_future(bench.harness_app(scope, self._receive, self._send))

    async def _receive(self):
        return {"type": "http.request", "body": await self.parts.get(), "more_body": True}

    async def _send(self, message):
        self.status = message.get("status", self.status)

    async def send(self, part: bytes) -> None:
        self.parts.put_nowait(part)
        while not self.parts.empty() and not self.task.done():
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)


async def test_unfinished_bodies_of_an_execution_are_bounded_together_and_given_back(bench):
    bench.gateway.config = GatewayConfig(max_body_bytes=1000, max_unread_bytes_per_execution=2500)
    async with bench.running():
        greedy, other = await bench.open("e1"), await bench.open("e2", engine=bench.says("ok<|im_end|>"))
        uploads = [Upload(bench, greedy) for _ in range(3)]
        for upload in uploads:
            await upload.send(b"x" * 900)
        assert [upload.status for upload in uploads] == [0, 0, 429] and greedy.budget.body_bytes == 1800
        other.route.set("cell-0")
        assert (await post(bench, other, PATH, body()).finish()).status == 200
        for upload in uploads[:2]:
            upload.task.cancel()
        await asyncio.gather(*(upload.task for upload in uploads), return_exceptions=True)
        assert (greedy.budget.body_bytes, greedy.budget.num_requests) == (0, 0)


async def test_requests_that_never_end_are_counted_like_calls(bench):
    async with bench.running():
        execution = await bench.open()
        uploads = [Upload(bench, execution) for _ in range(65)]
        for upload in uploads:
            await upload.send(b"{")
        assert [upload.status for upload in uploads] == [0] * 64 + [429]
        for upload in uploads:
            upload.task.cancel()
        await asyncio.gather(*(upload.task for upload in uploads), return_exceptions=True)


async def test_token_counting_is_off_the_event_loop_and_takes_one_turn_at_a_time(bench):
    """Sixty counts of one execution: another one's call is answered while the first of them is still encoded."""
    may_go_on, num_at_once = threading.Event(), []

    async with bench.running():
        greedy, other = await bench.open("e1"), await bench.open("e2", engine=bench.says("ok<|im_end|>"))
        encode = greedy.session.encode_ahead
        running = []

        def encode_ahead(request, matched):
            running.append(request)
            num_at_once.append(len(running))
            may_go_on.wait()
            encode(request, matched)
            running.remove(request)

        greedy.session.encode_ahead = encode_ahead
        counts = [post(bench, greedy, COUNT, body(f"{number} " + "a" * LARGE_CHARS)) for number in range(60)]
        while not running:
            await asyncio.sleep(0)
        other.route.set("cell-0")
        assert (await post(bench, other, PATH, body()).finish()).status == 200
        may_go_on.set()
        for count in counts:
            assert (await count.finish()).status == 200
        assert set(num_at_once) == {1}


def test_a_request_gives_back_what_it_took_however_it_ends():
    budget = Budget(GatewayConfig(max_body_bytes=10, max_unread_bytes_per_execution=10))
    with pytest.raises(InvalidRequest), budget.request() as taken:
        taken.take(8)
        taken.take(8)
    assert (budget.num_requests, budget.body_bytes) == (0, 0)


async def test_who_keeps_the_loop_busy_pauses_and_who_does_not_never_does(monkeypatch):
    now, busy, pauses = [0.0], [0.0], []

    async def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("qwengyre.gateway.budget.time.thread_time", lambda: busy[0])
    monkeypatch.setattr("qwengyre.gateway.budget.asyncio.sleep", sleep)

    async def pauses_of(cost: float, num_requests: int) -> list[float]:
        pauses.clear()
        budget = Budget(GatewayConfig(), lambda: now[0])
        for _ in range(num_requests):
            async with budget.turn():
                for _ in range(2):
                    with budget.busy():
                        busy[0] += cost / 2
        return list(pauses)

    assert await pauses_of(FREE_S * 0.99, 10_000) == []
    assert await pauses_of(2 * FREE_S, int(BURST_S / FREE_S / 2)) == []
    began = now[0]
    assert sum(await pauses_of(0.1, 110)) == pytest.approx((110 * 0.1 - BURST_S) / SHARE, rel=0.02)
    assert now[0] - began == pytest.approx((110 * 0.1 - BURST_S) / SHARE, rel=0.02)


@pytest.mark.parametrize("is_valid", [True, False])
async def test_a_large_body_is_read_beside_the_event_loop(bench, monkeypatch, is_valid):
    """A refused one too, which is read again for halves of characters."""
    threads = []
    monkeypatch.setattr(app, "mended", lambda body: (threads.append(threading.current_thread()), (body, 0))[1])

    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        parse = MessagesDialect.parse
        monkeypatch.setattr(
            MessagesDialect, "parse", lambda *given: (threads.append(threading.current_thread()), parse(*given))[1]
        )
        padding = b" " * app.LARGE_BODY_BYTES
        answer = await post(bench, execution, COUNT, padding + (body() if is_valid else b"{")).finish()
        assert answer.status == (200 if is_valid else 400)
    assert len(threads) == (1 if is_valid else 2) and threading.main_thread() not in threads


async def test_many_short_turns_are_rendered_beside_the_event_loop(bench):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        many = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(801)]
        data = json.dumps({"messages": many, "max_tokens": 9}).encode()
        request = MessagesDialect().parse(data, execution.session.items)
        assert execution.session.has_much_to_encode(request, execution.session.match(request))


async def test_what_is_recorded_of_an_execution_is_bounded_also_over_a_restart(bench):
    config = bench.gateway.config = GatewayConfig(max_journal_bytes_per_execution=2000)

    async with bench.running():
        greedy = await bench.open("e1", engine=bench.says(*["ok<|im_end|>"] * 50))
        other = await bench.open("e2")
        other.route.set("cell-0")
        answers = [await post(bench, greedy, PATH, body(f"{number}" * 20)).finish() for number in range(20)]
        assert answers[0].status == 200 and answers[-1].status == 403
        assert b"max_journal_bytes_per_execution" in answers[-1].body
        assert (await post(bench, other, PATH, body()).finish()).status == 200
    again = type(bench)(bench.rendering, bench.folder, config)
    with pytest.raises(InvalidRequest, match="max_journal_bytes"):
        again.gateway.executions["e1"].budget.check_journal()
    again.gateway.executions["e2"].budget.check_journal()
    again.journal.close()


@pytest.mark.parametrize("stops", [["x" * 5000], ["y" * 300] * 16])
async def test_stop_strings_are_bounded_together(bench, stops):
    async with bench.running():
        execution = await bench.open(engine=bench.says("ok<|im_end|>"))
        data = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stop_sequences": stops}).encode()
        answer = await post(bench, execution, PATH, data).finish()
        assert answer.status == 400 and b"4096 characters" in answer.body


def test_a_budget_that_no_body_fits_is_refused():
    with pytest.raises(ValueError, match="must be at least max_body_bytes"):
        GatewayConfig(max_body_bytes=11, max_unread_bytes_per_execution=10)
