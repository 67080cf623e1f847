"""The connection to an engine of another process, when the other side does not behave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.core import errors
from qwengyre.core.errors import ConfigError, ContextOverflow, EngineUnavailable
from qwengyre.engines.api import GenerateRequest, Sampling, Serving
from qwengyre.engines.remote import RemoteEngine
from qwengyre.engines.server import EngineServer
from qwengyre.engines.wire import Abort, StartCall, Status
from qwengyre.rpc.address import parse_address
from qwengyre.rpc.connection import Connection
from qwengyre.rpc.frames import HEADER
from qwengyre.rpc.server import RpcServer, Service
from qwengyre.testing.engines import ScriptedEngine
from tests.clock import put_forward

TOKEN = b"secret"


def request(name: str, max_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(name, np.arange(4, dtype=np.int32).tobytes(), Sampling(1.0, max_tokens, (), 0))


@asynccontextmanager
async def serve(address: str = "tcp://127.0.0.1:0") -> AsyncIterator[tuple[ScriptedEngine, EngineServer, str]]:
    engine = ScriptedEngine(held=True)
    server = EngineServer(engine, secret=TOKEN)
    try:
        yield engine, server, await server.serve(address)
    finally:
        await server.close()
        await engine.close()


async def tokens(engine: Serving, name: str, max_tokens: int = 5) -> list[int]:
    async with aclosing(engine.generate(request(name, max_tokens))) as stream:
        return [token async for chunk in stream for token in chunk.token_ids]


async def test_without_the_token_there_is_no_service():
    async with serve() as (engine, _, address):
        stranger = RemoteEngine(address, secret=b"guess")
        with pytest.raises(EngineUnavailable, match="secret"):
            await stranger.connect()
        assert engine.requests == []

    with pytest.raises(ConfigError):
        EngineServer(ScriptedEngine(), secret=b"")


async def test_what_a_stranger_says_is_not_heard():
    """What the wire does with strangers of every kind: tests/unit/rpc/test_wire.py."""

    async with serve() as (engine, _, address):
        where = parse_address(address)
        reader, writer = await asyncio.open_connection(where.host, where.port)
        running = asyncio.create_task(tokens(engine, "b"))
        while not engine.capacity().running:
            await asyncio.sleep(0)
        order = msgspec.msgpack.encode(Abort(["b"]))
        writer.write(HEADER.pack(len(order), 1) + order)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        await engine.grant("b", 5)
        assert len(await running) == 5
        await engine.grant("a", 5)
        friend = RemoteEngine(address, secret=TOKEN)
        assert len(await tokens(friend, "a")) == 5
        await friend.close()


async def test_a_lost_connection_ends_every_waiting_call_at_once_and_the_next_one_connects_again():
    async with serve() as (engine, server, address):
        remote = RemoteEngine(address, secret=TOKEN)
        waiting = [asyncio.create_task(tokens(remote, f"held-{index}")) for index in range(5)]
        while len(engine.requests) < 5:
            await asyncio.sleep(0)
        for connection in server.connections:
            connection.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, EngineUnavailable) for result in results)
        while engine.capacity().running:
            await asyncio.sleep(0)
        await engine.grant("a", 5)
        assert len(await tokens(remote, "a")) == 5
        await remote.close()


class Silent(Service):
    """Says once how it is, and nothing after that."""

    messages = (StartCall,)

    def __init__(self) -> None:
        super().__init__({})

    def begin(self, connection: Connection) -> None:
        engine = ScriptedEngine()
        connection.send(Status(engine.capacity(), engine.stats()))


async def test_a_silent_server_is_given_up():
    server = RpcServer(TOKEN, Silent)
    remote = RemoteEngine(await server.listen("tcp://127.0.0.1:0"), secret=TOKEN, silence_deadline_s=0.05)
    with pytest.raises(EngineUnavailable, match="silent"):
        await tokens(remote, "a")
    await server.close()


async def test_an_operation_has_a_deadline():
    async with serve() as (engine, _, address):
        remote = RemoteEngine(address, secret=TOKEN, deadline_s=60.0, silence_deadline_s=3600.0)
        await remote.connect()

        async def never(request_ids: list[str]) -> None:
            put_forward(60.0)
            await asyncio.Event().wait()

        engine.abort = never  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailable, match="Abort"):
            await remote.abort(["a"])
        await remote.close()


async def test_nobody_there_is_an_error_with_the_address():
    with pytest.raises(EngineUnavailable, match=r"tcp://127\.0\.0\.1:1"):
        await RemoteEngine("tcp://127.0.0.1:1", secret=TOKEN).connect()


async def test_an_address_that_is_taken_is_a_config_error():
    async with serve() as (engine, _, address):
        with pytest.raises(ConfigError, match="cannot listen"):
            await EngineServer(engine, secret=TOKEN).serve(address)


async def test_a_unix_socket_serves_its_owner_only(tmp_path: Path):
    path = tmp_path / "engine.sock"

    async with serve(f"unix:{path}") as (engine, _, address):
        assert path.stat().st_mode & 0o077 == 0
        await engine.grant("a", 5)
        remote = RemoteEngine(address, secret=TOKEN)
        assert len(await tokens(remote, "a")) == 5
        await remote.close()


@pytest.mark.parametrize(
    "error", [ContextOverflow(num_tokens=9, max_tokens=4), errors.KVRefused("another version"), errors.StaleRead("released")]
)
async def test_errors_of_engines_arrive_as_they_are(error: errors.QwenGyreError):
    arrived = await raised_remotely(error)
    assert type(arrived) is type(error) and vars(arrived) == vars(error)


async def test_any_other_error_is_an_engine_that_does_not_serve():
    arrived = await raised_remotely(errors.CellFailed(3, "stalled"))
    assert type(arrived) is EngineUnavailable and "stalled" in str(arrived)


async def raised_remotely(error: errors.QwenGyreError) -> errors.QwenGyreError:
    caught: list[errors.QwenGyreError] = []

    async with serve() as (engine, _, address):

        async def refuse(token_ids: bytes) -> None:
            raise error

        engine.export_kv = refuse  # type: ignore[method-assign]
        remote = RemoteEngine(address, secret=TOKEN)
        with pytest.raises(errors.QwenGyreError) as raised:
            await remote.export_kv(b"")
        caught.append(raised.value)
        await remote.close()

    return caught[0]
