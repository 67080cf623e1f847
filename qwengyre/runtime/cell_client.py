"""The controller's end of a cell's control API: one typed call per operation, a deadline on each."""

from __future__ import annotations

from typing import TypeVar

import httpx
import msgspec

from qwengyre.cell import api
from qwengyre.cell.cell import CellAddress
from qwengyre.core import errors
from qwengyre.rpc.refusal import Refused, rebuild

Reply = TypeVar("Reply")


class CellClient:
    """Talks to one life of one cell. Raises CellFailed when the cell does not answer in time, or its own typed error."""

    def __init__(self, address: CellAddress, token: str) -> None:
        self.address = address
        self._http = httpx.AsyncClient(
            base_url=address.control,
            headers={"authorization": f"Bearer {token}"},
            limits=httpx.Limits(max_connections=16, keepalive_expiry=600),
            trust_env=False,
        )
        self._decode = msgspec.msgpack.Decoder(api.Answer).decode
        self._encode = msgspec.msgpack.Encoder().encode

    async def call(self, operation: api.Operation, expected: type[Reply], timeout_s: float) -> Reply:
        name = type(operation).__name__
        body = self._encode(api.Order(self.address.epoch, operation))
        try:
            response = await self._http.post("/op", content=body, timeout=timeout_s)
            response.raise_for_status()
            answer = self._decode(response.content)
        except httpx.TimeoutException:
            raise errors.CellFailed(self.address.cell, f"{name} did not answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise errors.CellFailed(self.address.cell, f"{name}: {error or type(error).__name__}") from error
        if isinstance(answer, Refused):
            raise self._refusal(name, answer)
        if not isinstance(answer, expected):
            raise errors.CellFailed(self.address.cell, f"{name} answered {type(answer).__name__}")
        return answer

    def _refusal(self, name: str, refused: Refused) -> errors.QwenGyreError:
        """The cell's own error again: its type, fields and words. Unless that is a CellFailed, the cell is well."""
        return rebuild(refused, f"cell {self.address.cell}: {name}: ")

    async def close(self) -> None:
        await self._http.aclose()
