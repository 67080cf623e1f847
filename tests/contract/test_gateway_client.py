"""What a controller expects of a gateway: the real one behind its socket, and the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError, UnknownExecution
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.gateway.serve import GatewayServer
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.testing.runtime import FakeGateway
from qwengyre.testing.tokenizers import write_byte_tokenizer

ONE, OTHER = ExecutionId("e000001-0"), ExecutionId("e000002-0")
SERVER = ServerId("cell-0")


@asynccontextmanager
async def fake(folder: Path) -> AsyncIterator[FakeGateway]:
    yield FakeGateway()


@asynccontextmanager
async def real(folder: Path, *, processes: int = 1) -> AsyncIterator[GatewayClient]:
    sockets = [folder / f"c{number}.sock" for number in range(processes)]
    async with AsyncExitStack() as stack:
        for number, socket in enumerate(sockets):
            config = GatewayProcessConfig(
                model=str(write_byte_tokenizer(folder / "model")),
                journal=str(folder / f"gateway-{number}.journal"),
                secret_file=str(folder / "secret"),
                control_socket=str(socket),
                port=0,
                number=number,
                gateway=GatewayConfig(renderer={"name": "qwen3"}, processes=processes),
            )
            await stack.enter_async_context(GatewayServer(config))
        client = GatewayClient(sockets, 60.0)
        yield client
        client.close()


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[GatewayClient]:
    """Of which one has ONE, and the other OTHER."""
    async with real(folder, processes=2) as client:
        assert {client.number_of(ONE), client.number_of(OTHER)} == {0, 1}
        yield client


@pytest.fixture(params=[real, two, fake], ids=["one process", "two processes", "fake"])
async def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GatewayClient | FakeGateway]:
    async with request.param(tmp_path) as made:
        yield made


async def test_an_attempt_that_is_opened_again_is_answered_the_same(gateway):
    opened = await gateway.open(OpenExecution(ONE, attempt=1))
    assert await gateway.open(OpenExecution(ONE, attempt=1, server=SERVER)) == opened
    assert opened.path.startswith("/e/") and opened.path.endswith("/v1")


async def test_executions_and_attempts_have_keys_of_their_own(gateway):
    opened = [await gateway.open(asked) for asked in (OpenExecution(ONE), OpenExecution(OTHER), OpenExecution(ONE, attempt=1))]
    assert len({one.key for one in opened}) == len({one.path for one in opened}) == 3
    assert (await gateway.close_execution(ONE)).opened.attempt == 1


async def test_an_older_attempt_is_refused(gateway):
    await gateway.open(OpenExecution(ONE, attempt=2))
    with pytest.raises(ConfigError, match="is at attempt 2 already"):
        await gateway.open(OpenExecution(ONE, attempt=1))


async def test_a_close_is_answered_the_same_again(gateway):
    await gateway.open(OpenExecution(ONE, attempt=3))
    closed = await gateway.close_execution(ONE)
    assert (closed.opened.execution, closed.opened.attempt, closed.records, closed.counts.calls) == (ONE, 3, [], 0)
    assert await gateway.close_execution(ONE) == closed


async def test_what_was_never_opened_cannot_be_closed(gateway):
    with pytest.raises(UnknownExecution, match="was never opened here"):
        await gateway.close_execution(ONE)


async def test_routes_and_moves_pass_over_what_is_not_open(gateway):
    await gateway.open(OpenExecution(ONE))
    await gateway.route({ONE: SERVER, OTHER: SERVER})
    moved = await gateway.move(SERVER, {ONE: None, OTHER: SERVER})
    assert (moved.calls_moved, moved.contexts_moved, moved.tokens_moved, moved.kv_bytes) == (0, 0, 0, 0)


async def test_servers_come_again_and_go(gateway):
    for _ in range(2):
        await gateway.add_server(SERVER, "tcp://127.0.0.1:1", b"secret")
    for _ in range(2):
        await gateway.remove_server(SERVER)


async def test_it_answers_its_heartbeat_and_counts_no_call_that_never_came(gateway):
    await gateway.ping(60.0)
    assert (await gateway.report()).stats.calls_started == 0
