"""Errors of a cell arrive as what they are: a cell that refuses is not a cell that failed. A cell that does not answer is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from qwengyre.cell import api
from qwengyre.cell.cell import CellAddress
from qwengyre.core.errors import CellFailed, MembershipBroken, MessageTooLarge, NonFiniteLoss, QwenGyreError, StaleRead
from qwengyre.rpc.frames import MAX_MESSAGE_BYTES
from qwengyre.rpc.server import RpcServer, Service
from qwengyre.runtime.cell_client import CellClient

SECRET = b"secret"
TIMEOUT_S = 60.0


class FakeCell:
    """Answers what it is told to: raises an error, or replies."""

    def __init__(self, answer: Exception | msgspec.Struct) -> None:
        self.answer, self.asked = answer, []

    async def handle(self, asked: api.CellRequest) -> msgspec.Struct:
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def with_cell(answer: Exception | msgspec.Struct) -> AsyncIterator[tuple[CellClient, FakeCell]]:
    cell = FakeCell(answer)
    server = RpcServer(SECRET, lambda: Service({api.CellRequest: cell.handle}))
    client = CellClient(CellAddress(3, 2, await server.listen("tcp://127.0.0.1:0"), "tcp://127.0.0.1:1", 1), SECRET)
    try:
        yield client, cell
    finally:
        client.close()
        await server.close()


async def raised(answer: Exception | msgspec.Struct, timeout_s: float = TIMEOUT_S) -> QwenGyreError:
    async with with_cell(answer) as (client, _):
        with pytest.raises(QwenGyreError) as error:
            await client.call(api.Reduce(2), api.Timed, timeout_s)
        return error.value


async def test_an_operation_carries_the_incarnation_and_has_its_reply():
    async with with_cell(api.Timed({"reduce": 1.0})) as (client, cell):
        assert await client.call(api.Reduce(2), api.Timed, TIMEOUT_S) == api.Timed({"reduce": 1.0})
        assert cell.asked == [api.CellRequest(2, api.Reduce(2))]


REFUSED = [
    NonFiniteLoss("tiny", execution="e000001-0", path=2, what="loss is nan"),
    MembershipBroken(rank=1, membership=3, num_members=2, reason="late"),
    StaleRead("released"),
]


@pytest.mark.parametrize("error", REFUSED, ids=lambda error: type(error).__name__)
async def test_errors_keep_their_type_and_fields_and_say_who_had_them(error):
    arrived = await raised(error)
    assert type(arrived) is type(error) and vars(arrived) == vars(error)
    assert str(arrived) == f"cell 3: Reduce: {error}"


async def test_a_request_for_another_incarnation_is_a_failure_of_the_cell():
    error = await raised(CellFailed(3, "a request for incarnation 1"))
    assert isinstance(error, CellFailed) and (error.cell, error.reason) == (3, "a request for incarnation 1")


@pytest.mark.parametrize("answer", [KeyError("a bug"), api.Offered("not what was asked")], ids=["bug", "another reply"])
async def test_a_cell_that_breaks_over_a_request_has_failed(answer):
    error = await raised(answer)
    assert type(error) is CellFailed and error.cell == 3 and "Reduce" in error.reason


async def test_a_cell_that_is_not_there_has_failed():
    client = CellClient(CellAddress(3, 0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", 1), SECRET)
    with pytest.raises(CellFailed, match="cell 3: Health: "):
        await client.call(api.Health(), api.HealthReport, TIMEOUT_S)


async def test_a_request_that_no_wire_carries_is_not_the_cells_fault():
    async with with_cell(api.Timed()) as (client, cell):
        with pytest.raises(MessageTooLarge):
            await client.call(api.LoadCheckpoint("x" * MAX_MESSAGE_BYTES), api.Timed, TIMEOUT_S)
        assert cell.asked == []
