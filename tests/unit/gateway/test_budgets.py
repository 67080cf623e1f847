"""What one execution may have at once: bytes of unfinished bodies, requests that are read or counted, one turn at a time."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from qwengyre.gateway.budget import Budget
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.protocol.fields import InvalidRequest
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
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"x-api-key", execution.keys.key.encode())]}
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


def test_a_budget_that_no_body_fits_is_refused():
    with pytest.raises(ValueError, match="must be at least max_body_bytes"):
        GatewayConfig(max_body_bytes=11, max_unread_bytes_per_execution=10)
