"""An engine in another process, as if it were here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from qwengyre.core.errors import EngineError, EngineUnavailable, QwenGyreError, TransferError
from qwengyre.engines.api import Capabilities, Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.engines.server import split_address
from qwengyre.engines.wire import Answer, Ask, Chunks, Failed, FrameProtocol, FromServer, Hello, Start, Status
from qwengyre.rpc.refusal import Refused, rebuild
from qwengyre.transfer.api import Exposure


class RemoteEngine:
    """Implements `engines.api.Engine` against an EngineServer. Connects at first use, and again after a loss.

    A lost connection, or `silence_deadline_s` without a frame (the server sends one a second), raises EngineUnavailable
    in every waiting call at once. `deadline_s` bounds one operation.
    """

    def __init__(self, address: str, *, secret: bytes, deadline_s: float = 120.0, silence_deadline_s: float = 30.0):
        self.address = address
        self._secret, self._deadline_s, self._silence_deadline_s = secret, deadline_s, silence_deadline_s
        self._protocol: FrameProtocol | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count()
        self._names: dict[str, str] = {}
        """Request id -> its name on the wire."""
        self._ending: set[str] = set()
        """Names of calls that were given up and whose last chunk is still to come: not to be used meanwhile."""
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._streams: dict[str, asyncio.Queue[TokenChunk | QwenGyreError]] = {}
        self._status: Status | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def connect(self) -> None:
        """Connect now. Raises EngineUnavailable when nobody answers there or the secret is refused."""
        await self._connected()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        request_id = request.request_id
        if request_id in self._names:
            raise EngineUnavailable(f"request {request_id} is running already")
        name = f"{request_id}/{next(self._numbers)}" if request_id in self._ending else request_id
        self._names[request_id] = name
        stream = self._streams[name] = asyncio.Queue()
        protocol, finished = None, False
        try:
            protocol = await self._connected()
            protocol.send(Start(msgspec.structs.replace(request, request_id=name)))
            while not finished:
                item = await stream.get()
                if isinstance(item, QwenGyreError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield msgspec.structs.replace(item, request_id=request_id)
        finally:
            del self._streams[name], self._names[request_id]
            if not finished and protocol is not None and self._protocol is protocol:
                self._ending.add(name)
                protocol.send(Ask(next(self._numbers), "abort", request_ids=[name]))

    async def abort(self, request_ids: list[str]) -> None:
        await self._ask("abort", request_ids=[self._names[request_id] for request_id in request_ids if request_id in self._names])

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        await self._ask("pause", mode=mode)

    async def resume(self) -> None:
        await self._ask("resume")

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        await self._ask("update_weights", snapshot=snapshot, version=version)

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        return (await self._ask("export_kv", token_ids=token_ids)).handle

    async def import_kv(self, handle: KVHandle) -> int:
        return (await self._ask("import_kv", handle=handle)).num_tokens

    async def release(self, handle_id: str) -> None:
        await self._ask("release", handle_id=handle_id)

    async def offload(self) -> None:
        await self._ask("offload")

    async def restore(self, snapshot: Exposure, version: int) -> None:
        await self._ask("restore", snapshot=snapshot, version=version)

    def capacity(self) -> Capacity:
        """As of the last operation, end of a call or second, whichever came last. Raises EngineUnavailable before the first connection."""
        return self._last_status().capacity

    def capabilities(self) -> Capabilities:
        return self._last_status().capabilities

    def stats(self) -> EngineStats:
        return self._last_status().stats

    async def close(self) -> None:
        """Close this side; the engine lives on, without the requests of this side."""
        if self._protocol is not None:
            self._protocol.close()
        self._on_lost(EngineUnavailable("closed by this side"))

    async def _connected(self) -> FrameProtocol:
        async with self._connecting:
            if self._protocol is not None:
                return self._protocol
            loop = asyncio.get_running_loop()
            self._welcome = loop.create_future()
            protocol = FrameProtocol(FromServer, self._on_message, lambda: self._on_lost_by(protocol))
            self._protocol = protocol
            kind, target = split_address(self.address)
            try:
                async with asyncio.timeout(self._deadline_s):
                    if kind == "unix":
                        await loop.create_unix_connection(lambda: protocol, target)
                    else:
                        host, _, port = target.rpartition(":")
                        await loop.create_connection(lambda: protocol, host, int(port))
                    protocol.send(Hello(self._secret))
                    await self._welcome
            except (OSError, TimeoutError) as error:
                self._protocol = None
                protocol.close()
                raise EngineUnavailable(f"no engine answers at {self.address}: {error or 'deadline passed'}") from error
            self._heard_at = loop.time()
            self._watch_silence()
            return protocol

    async def _ask(self, method: str, **arguments: object) -> Answer:
        protocol = await self._connected()
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            protocol.send(Ask(number, method, **arguments))
            answer = await asyncio.wait_for(future, self._deadline_s)
        except TimeoutError:
            raise EngineUnavailable(f"{self.address} did not answer {method!r} within {self._deadline_s} s") from None
        finally:
            self._answers.pop(number, None)
        if answer.failure is not None:
            raise _as_an_engines(answer.failure)
        return answer

    def _on_message(self, message: FromServer) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if isinstance(message, Chunks):
            for chunk in message.chunks:
                self._pass_on(chunk.request_id, chunk, is_last=chunk.finish_reason is not None)
        elif isinstance(message, Status):
            self._status = message
            if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(None)
        elif isinstance(message, Failed):
            self._pass_on(message.request_id, _as_an_engines(message.failure), is_last=True)
        elif (future := self._answers.get(message.number)) and not future.done():
            future.set_result(message)

    def _pass_on(self, name: str, item: TokenChunk | QwenGyreError, *, is_last: bool) -> None:
        if stream := self._streams.get(name):
            stream.put_nowait(item)
        elif is_last:
            self._ending.discard(name)

    def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        if self._protocol is None:
            return
        if loop.time() - self._heard_at > self._silence_deadline_s:
            self._protocol.close()
            self._on_lost(EngineUnavailable(f"{self.address} was silent for {self._silence_deadline_s} s"))
            return
        self._watch = loop.call_later(self._silence_deadline_s / 4, self._watch_silence)

    def _on_lost_by(self, protocol: FrameProtocol) -> None:
        if self._protocol is protocol:
            self._on_lost(EngineUnavailable(f"the connection to {self.address} was lost"))

    def _on_lost(self, error: EngineUnavailable) -> None:
        self._protocol = None
        self._ending.clear()
        if self._watch is not None:
            self._watch.cancel()
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(EngineUnavailable(f"{self.address} closed the connection: is the secret right?"))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        for stream in self._streams.values():
            stream.put_nowait(error)

    def _last_status(self) -> Status:
        if self._status is None:
            raise EngineUnavailable(f"not connected to {self.address} yet")
        return self._status


def _as_an_engines(refused: Refused) -> QwenGyreError:
    """The error that the engine raised; one that engines do not raise is, to who calls one, an engine that does not serve."""
    error = rebuild(refused)
    return error if isinstance(error, (EngineError, TransferError)) else EngineUnavailable(f"{refused.kind}: {error}")
