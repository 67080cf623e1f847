"""The controller's end of a cell's wire: one typed call per operation, a deadline on each."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from qwengyre.cell import api
from qwengyre.cell.cell import CellAddress
from qwengyre.core.errors import CellFailed, MessageTooLarge, Unreachable, WireError
from qwengyre.rpc.client import Client

Reply = TypeVar("Reply", bound=msgspec.Struct)


class CellClient:
    """Talks to one incarnation of one cell."""

    def __init__(self, address: CellAddress, secret: bytes) -> None:
        self.address = address
        self._client = Client(address.control, secret)

    async def call(self, operation: api.Operation, expected: type[Reply], timeout_s: float) -> Reply:
        """Raises CellFailed when the cell does not answer in time, or breaks over it; MessageTooLarge; or what it refused with: then
        the cell is well, unless it says CellFailed itself.
        """
        cell, name = self.address.cell, type(operation).__name__
        request = api.CellRequest(self.address.incarnation, operation)
        try:
            return await self._client.call(request, expected, timeout_s, name, f"cell {cell}: {name}: ")
        except MessageTooLarge:
            raise
        except Unreachable as error:
            raise CellFailed(cell, f"{name}: {error.reason}") from error
        except WireError as error:
            raise CellFailed(cell, f"{name}: {error}") from error

    def close(self) -> None:
        self._client.close()
