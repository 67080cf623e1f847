"""An engine in another process, as if it were here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from qwengyre.core.errors import EngineError, EngineUnavailable, QwenGyreError, TransferError, Unreachable
from qwengyre.engines.api import Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.engines.wire import (
    Abort,
    Chunks,
    Exported,
    ExportKV,
    Failed,
    Imported,
    ImportKV,
    Release,
    StartCall,
    Status,
)
from qwengyre.rpc.client import Client
from qwengyre.rpc.refusal import rebuild
from qwengyre.rpc.server import Done

Reply = TypeVar("Reply", bound=msgspec.Struct)


class RemoteEngine:
    """Implements `engines.api.Serving` against an EngineServer. Connects at first use, and again after a loss.

    A lost connection, or `silence_deadline_s` without a message (the server sends one a second), raises EngineUnavailable
    in every waiting call at once. `deadline_s` bounds one operation.
    """

    def __init__(self, address: str, *, secret: bytes, deadline_s: float = 120.0, silence_deadline_s: float = 30.0):
        self.address = address
        self._deadline_s, self._silence_deadline_s = deadline_s, silence_deadline_s
        self._client = Client(address, secret, messages=(Status, Chunks, Failed), hear=self._on_message, on_lost=self._on_lost)
        self._numbers = itertools.count()
        self._names: dict[str, str] = {}
        """Request id -> its name on the wire."""
        self._ending: set[str] = set()
        """Names of calls that were given up and whose last chunk is still to come: not to be used meanwhile."""
        self._streams: dict[str, asyncio.Queue[TokenChunk | QwenGyreError]] = {}
        self._status: Status | None = None
        self._has_status = asyncio.Event()
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def connect(self) -> None:
        """Connect now. Raises EngineUnavailable when nobody answers there or the secret is refused."""
        try:
            await self._client.connect(self._deadline_s)
            async with asyncio.timeout(self._deadline_s):
                await self._has_status.wait()
        except Unreachable as error:
            raise EngineUnavailable(f"no engine answers at {self.address}: {error.reason}; is the secret right?") from error
        except TimeoutError:
            raise EngineUnavailable(f"{self.address} was silent for {self._deadline_s:g} s") from None
        if self._watch is None:
            self._heard_at = asyncio.get_running_loop().time()
            self._watch_silence()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        request_id = request.request_id
        if request_id in self._names:
            raise EngineUnavailable(f"request {request_id} is running already")
        name = f"{request_id}/{next(self._numbers)}" if request_id in self._ending else request_id
        self._names[request_id] = name
        stream = self._streams[name] = asyncio.Queue()
        has_begun, finished = False, False
        try:
            await self.connect()
            self._client.say_nowait(StartCall(msgspec.structs.replace(request, request_id=name)))
            has_begun = True
            while not finished:
                item = await stream.get()
                if isinstance(item, QwenGyreError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield msgspec.structs.replace(item, request_id=request_id)
        finally:
            del self._streams[name], self._names[request_id]
            if has_begun and not finished and self._client.is_connected:
                self._ending.add(name)
                self._client.request_nowait(Abort([name]))

    async def abort(self, request_ids: list[str]) -> None:
        names = [self._names[request_id] for request_id in request_ids if request_id in self._names]
        await self._ask(Abort(names), Done)

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        return (await self._ask(ExportKV(token_ids), Exported)).handle

    async def import_kv(self, handle: KVHandle) -> int:
        return (await self._ask(ImportKV(handle), Imported)).num_tokens

    async def release(self, handle_id: str) -> None:
        await self._ask(Release(handle_id), Done)

    def capacity(self) -> Capacity:
        """As of the last operation, end of a call or second, whichever came last. Raises EngineUnavailable before the first connection."""
        return self._last_status().capacity

    def stats(self) -> EngineStats:
        return self._last_status().stats

    async def close(self) -> None:
        """Close this side; the engine lives on, without the calls of this side."""
        self._client.close()

    async def _ask(self, request: msgspec.Struct, expected: type[Reply]) -> Reply:
        await self.connect()
        try:
            return await self._client.call(request, expected, self._deadline_s)
        except QwenGyreError as error:
            raise _as_an_engines(error) from error

    def _on_message(self, message: msgspec.Struct) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        match message:
            case Chunks():
                for chunk in message.chunks:
                    self._pass_on(chunk.request_id, chunk, is_last=chunk.finish_reason is not None)
            case Failed():
                self._pass_on(message.request_id, _as_an_engines(rebuild(message.refused)), is_last=True)
            case Status():
                self._status = message
                self._has_status.set()

    def _pass_on(self, name: str, item: TokenChunk | QwenGyreError, *, is_last: bool) -> None:
        if stream := self._streams.get(name):
            stream.put_nowait(item)
        elif is_last:
            self._ending.discard(name)

    def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        self._watch = None
        if not self._client.is_connected:
            return
        if loop.time() - self._heard_at > self._silence_deadline_s:
            self._client.cut(f"{self.address} was silent for {self._silence_deadline_s} s")
            return
        self._watch = loop.call_later(self._silence_deadline_s / 4, self._watch_silence)

    def _on_lost(self, reason: str) -> None:
        error = EngineUnavailable(f"the connection to {self.address} was lost: {reason}")
        self._has_status.clear()
        self._ending.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for stream in self._streams.values():
            stream.put_nowait(error)

    def _last_status(self) -> Status:
        if self._status is None:
            raise EngineUnavailable(f"not connected to {self.address} yet")
        return self._status


def _as_an_engines(error: QwenGyreError) -> QwenGyreError:
    """An error that engines do not raise is, to who calls one, an engine that does not serve."""
    if isinstance(error, (EngineError, TransferError)):
        return error
    return EngineUnavailable(f"{type(error).__name__}: {error}")
