"""Two gateways of one run, one of them killed in mid-stream: real processes, the official client, one engine behind a socket."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import openai
import pytest

from qwengyre.core.ids import ExecutionId
from qwengyre.engines.server import EngineServer
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import OpenedExecution, OpenExecution
from qwengyre.gateway.keys import load_secret
from qwengyre.recorded.run import RecordedRun
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.gateway_client import GatewayClient, gateway_of
from qwengyre.runtime.gateway_process import GatewayProcess
from qwengyre.telemetry.folder import RunFolder
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer

pytestmark = pytest.mark.integration
SECRET = b"engine-token"
USER = {"role": "user", "content": "hi"}
SAID = "one two three four five"
FIRST = 7
"""Tokens before the kill: `one two`."""
DEADLINE_S = 300.0
"""A scenario that hangs fails instead; far beyond what a busy machine needs."""


def named_for(gateway: int) -> ExecutionId:
    names = (ExecutionId(f"e000001-{number}") for number in count())
    return next(name for name in names if gateway_of(name, 2) == gateway)


class Gateways:
    """Two supervised gateways as a run has them, and their owner."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        for made in (self.run.journal, self.run.logs):
            made.mkdir()
        load_secret(self.run.journal / "secret")
        self.processes = [
            GatewayProcess(self._config(number, folder), folder, self.run.logs, RuntimeConfig()) for number in (0, 1)
        ]
        self.owner = GatewayClient([one.control_socket for one in self.processes], DEADLINE_S)
        self.told_again: list[int] = []
        self.clients: list[openai.AsyncOpenAI] = []

    def _config(self, number: int, folder: Path) -> GatewayProcessConfig:
        return GatewayProcessConfig(
            model=str(write_byte_tokenizer(folder / "model")),
            journal=str(self.run.gateway_journal_of(number)),
            secret_file=str(self.run.journal / "secret"),
            control_socket=str(folder / f"c{number}.sock"),
            port=0,
            ready_file=str(folder / f"ready-{number}"),
            number=number,
            gateway=GatewayConfig(renderer={"name": "qwen3"}, max_context_tokens=100_000, processes=2),
        )

    @asynccontextmanager
    async def running(self, engine: ScriptedEngine, folder: Path) -> AsyncIterator[None]:
        server = EngineServer(engine, secret=SECRET)
        self.address = await server.serve(f"unix:{folder / 'e.sock'}")
        try:
            await asyncio.gather(*(one.start() for one in self.processes))
            await self.owner.add_server("cell-0", self.address, SECRET)
            yield
        finally:
            self.owner.close()
            await asyncio.gather(*(one.close() for one in self.clients))
            await asyncio.gather(*(one.stop() for one in self.processes))
            await server.close()

    async def tell_again(self, gateway: int, execution: ExecutionId) -> None:
        """What the controller does when a gateway is back."""
        await self.owner.add_server("cell-0", self.address, SECRET, gateway=gateway)
        await self.owner.route({execution: "cell-0"})
        self.told_again.append(gateway)

    def client(self, execution: ExecutionId, opened: OpenedExecution) -> openai.AsyncOpenAI:
        port = self.processes[self.owner.number_of(execution)].port
        self.clients.append(openai.AsyncOpenAI(api_key=opened.key, base_url=f"http://127.0.0.1:{port}/v1", max_retries=100))
        return self.clients[-1]


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


def test_one_of_two_gateways_is_killed_in_mid_stream_and_no_client_notices(tmp_path: Path):
    stays, hit = named_for(0), named_for(1)
    said = byte_tokenizer().encode(f"{SAID}<|im_end|>").ids
    engine = ScriptedEngine(lambda request: said[request.sampling.first_index :], max_context_tokens=100_000, held=True)
    gateways = Gateways(tmp_path)

    async def grant(execution: ExecutionId, num_tokens: int) -> None:
        for call in range(8):
            for start in range(1, 4):
                await engine.grant(f"{execution}/c{call}#{start}", num_tokens)

    async def scenario() -> None:
        async with gateways.running(engine, tmp_path):
            gateways.processes[1].on_restarted = lambda: gateways.tell_again(1, hit)
            keys = {name: await gateways.owner.open(OpenExecution(name, server="cell-0")) for name in (stays, hit)}
            whole = asyncio.create_task(gateways.client(hit, keys[hit]).chat.completions.create(model="m", messages=[USER]))
            stream = await gateways.client(stays, keys[stays]).chat.completions.create(model="m", messages=[USER], stream=True)
            for name in (stays, hit):
                await grant(name, FIRST)
            heard = ""
            async for chunk in stream:
                heard += chunk.choices[0].delta.content or ""
                if heard == SAID[:FIRST]:
                    break
            while (await gateways.owner.report()).stats.tokens_sampled < 2 * FIRST:
                await asyncio.sleep(0.01)
            os.kill(gateways.processes[1]._child.pid, signal.SIGKILL)
            await grant(stays, 3)
            async for chunk in stream:  # while the other gateway is away
                heard += chunk.choices[0].delta.content or ""
                if heard == SAID[: FIRST + 3]:
                    break
            assert gateways.told_again == []
            await grant(hit, len(said))
            answer = await whole
            assert answer.choices[0].message.content == SAID
            assert gateways.told_again == [1]
            await grant(stays, len(said))
            heard += "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert heard == SAID
            closed = {name: await gateways.owner.close_execution(name) for name in (stays, hit)}
        stay_requests = [request for request in engine.requests if request.request_id.startswith(f"{stays}/")]
        assert len(stay_requests) == 1, "the restart of the other gateway made a call start again"
        calls = {log.opened.execution: log for log in RecordedRun(gateways.run.gateway_journals).attempts()}
        assert calls.keys() == {stays, hit}
        assert [call.finished.abandoned for call in calls[stays]] == [False]
        last = list(calls[hit])[-1]
        assert not last.finished.abandoned and list(calls[hit].answer_ids(last.number)) == said
        assert {log.opened.session for log in calls.values()} == {0, 1}
        assert {closed[name].opened.execution for name in closed} == {stays, hit}

    play(scenario)
