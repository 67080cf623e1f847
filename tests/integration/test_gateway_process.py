"""The gateway as a process, killed and started again, with an engine behind a socket."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import openai
import pytest

from qwengyre.engines.server import EngineServer
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.gateway.serve import Listening
from qwengyre.rpc.tether import tethered
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.testing.engines import ScriptedEngine, replies
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.records import CallFinished, CallStarted, TokensSampled

pytestmark = pytest.mark.integration
TOKEN = b"engine-token"
USER = {"role": "user", "content": "hi"}
DEADLINE_S = 300.0
"""Of a request to the gateway; far beyond what a busy machine needs."""


async def grant(engine: ScriptedEngine, call: str, num_tokens: int) -> None:
    """Let a call make tokens, at whichever start of it an engine answers."""
    for start in range(1, 6):
        await engine.grant(f"{call}#{start}", num_tokens)


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


class Process:
    """A gateway process and its two sockets."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clients: list[openai.AsyncOpenAI] = []
        self.config = GatewayProcessConfig(
            model=str(write_byte_tokenizer(folder / "model")),
            journal=str(folder / "gateway.journal"),
            secret_file=str(folder / "secret"),
            control_socket=str(folder / "c.sock"),
            port=0,
            harness_socket=str(folder / "h" / "h.sock"),
            ready_file=str(folder / "ready.json"),
            gateway=GatewayConfig(renderer={"name": "qwen3"}, max_context_tokens=100_000),
        )
        (folder / "gateway.json").write_bytes(msgspec.json.encode(self.config))

    async def start(self) -> None:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = tethered("qwengyre.gateway", ["--config", str(self.folder / "gateway.json")])
        with open(self.folder / "log", "ab") as log:
            self.process = await asyncio.create_subprocess_exec(*command, stderr=log)
        while not ready.exists():
            assert self.process.returncode is None, (self.folder / "log").read_text()
            await asyncio.sleep(0.05)
        self.listening = msgspec.json.decode(ready.read_bytes(), type=Listening)
        self.owner = GatewayClient([Path(self.listening.control_socket)], DEADLINE_S)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def serve_by(self, address: str, execution: str) -> None:
        await self.owner.add_server("cell-0", address, TOKEN)
        await self.owner.route({execution: "cell-0"})


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Process]:
    process = Process(folder)
    await process.start()
    try:
        yield process
    finally:
        for client in process.clients:
            await client.close()
        if process.process.returncode is None:
            process.process.terminate()
        assert await process.process.wait() in (0, -signal.SIGKILL), (folder / "log").read_text()


@contextlib.asynccontextmanager
async def serving(engine: ScriptedEngine, folder: Path) -> AsyncIterator[str]:
    server = EngineServer(engine, secret=TOKEN)
    address = await server.serve(f"unix:{folder / 'e.sock'}")
    try:
        yield address
    finally:
        await server.close()


def ai(process: Process, key: str, **options: object) -> openai.AsyncOpenAI:
    """A client that is closed with the process: a forgotten one closes itself in a later test, whose loop is another."""
    client = openai.AsyncOpenAI(api_key=key, base_url=f"http://127.0.0.1:{process.listening.port}/v1", **options)
    process.clients.append(client)
    return client


async def test_streams_over_tcp_and_gives_the_records(tmp_path):
    said = "<think>\nwell\n</think>\n\nHello there<|im_end|>"
    engine = ScriptedEngine(replies([ids(said)]), max_context_tokens=100_000)
    async with running(tmp_path) as process, serving(engine, tmp_path) as address:
        opened = await process.owner.open(OpenExecution("e1"))
        await process.serve_by(address, "e1")
        stream = await ai(process, opened.key).chat.completions.create(model="m", messages=[USER], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hello there"
        closed = await process.owner.close_execution("e1")
        sampled = b"".join(event.token_ids for event in closed.records if isinstance(event, TokensSampled))
        assert list(memoryview(sampled).cast("i")) == ids(said)
        assert (await process.owner.close_execution("e1")) == closed


async def test_killed_gateway_continues_from_the_last_token(tmp_path):
    said = "one two three four five<|im_end|>"
    engine = ScriptedEngine(replies([ids(said)]), max_context_tokens=100_000, held=True)
    async with running(tmp_path) as process, serving(engine, tmp_path) as address:
        opened = await process.owner.open(OpenExecution("e1"))
        await process.serve_by(address, "e1")
        client = ai(process, opened.key, max_retries=0)
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        await grant(engine, "e1/c0", 7)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) >= len("one two"):
                break
        await process.kill()
        await process.start()
        await process.serve_by(address, "e1")
        await grant(engine, "e1/c1", 100)
        answer = await ai(process, opened.key).chat.completions.create(model="m", messages=[USER])
        assert answer.choices[0].message.content == "one two three four five"
        closed = await process.owner.close_execution("e1")
        starts = [event for event in closed.records if isinstance(event, CallStarted)]
        ends = [event for event in closed.records if isinstance(event, CallFinished)]
        assert starts[1].base == starts[0].call and starts[1].context_ids == b""
        assert [end.abandoned for end in ends] == [True, False]
        assert ends[0].num_sampled >= 7 and ends[0].num_sampled + ends[1].num_sampled == len(ids(said))
        assert engine.requests[-1].sampling.first_index >= ends[0].num_sampled
        await process.kill()
        await process.start()
        assert (await process.owner.close_execution("e1")) == closed
