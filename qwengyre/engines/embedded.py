"""The embedded engine: `EngineCore` in a thread of its own behind the asyncio face of `engines.api`.

    event loop                                    engine thread
      generate / abort / pause ... --commands-->    take commands, iterate, take commands ...
      one callback per iteration  <--chunks-----    all chunks of the iteration at once

The thread alone owns the core. The event loop never waits for it; it is told by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch

from qwengyre.core.errors import EngineError, EngineUnavailable, KVRefused, QwenGyreError
from qwengyre.engines.api import Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.served import read_served
from qwengyre.models.adapter_record import ADAPTER, Base
from qwengyre.models.adapters import merging
from qwengyre.models.placement import HOST, device_of
from qwengyre.models.probe import PROBE, probe_in
from qwengyre.transfer.api import Exposure, Transport
from qwengyre.transfer.layout import placeholders

log = logging.getLogger(__name__)
Result = TypeVar("Result")
TOKENS = "token_ids"
"""Region of exported KV that holds the tokens themselves."""
KV_INCARNATION = 0
"""Exported KV is never rewritten, so one incarnation is enough; its version is that of the weights."""


class EmbeddedEngine:
    """A model in this process, on its processor or its device. Implements `engines.api.CellEngine`.

    Starts with the weights of `model_dir` as version 0; `start_offloaded` starts without memory, for `restore`. Raises ConfigError for a
    device that is not there.
    """

    def __init__(
        self,
        model_dir: Path,
        transport: Transport,
        config: EngineConfig,
        *,
        start_offloaded: bool = False,
        base: Base | None = None,
    ):
        """`base`: the weights that adapters change, shared with others in this process; None reads the folder's when they come."""
        self._base = Base(model_dir) if base is None else base
        self.device = device_of(config.device, "engine.device")
        self.config, self.spec = config, read_served(model_dir)
        self._transport = transport
        self._core: EngineCore | None = None
        self._totals = EngineStats(0, 0, 0, 0, 0, 0.0)
        self._busy_s, self._failure = 0.0, ""
        self._pinned: dict[str, tuple[Exposure, float]] = {}
        self._numbers = itertools.count()
        self._names: dict[str, str] = {}
        """Request id -> name in the core, used once: chunks of a call that was given up cannot reach its successor."""
        self._streams: dict[str, asyncio.Queue[TokenChunk | EngineError]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._paused = self._closed = False
        if not start_offloaded:
            self._core = EngineCore(self.spec, config, version=0, device=self.device)
            self._core.load_folder(model_dir)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        request_id = request.request_id
        if request_id in self._names:
            raise EngineUnavailable(f"request {request_id} is running already")
        name = self._names[request_id] = f"{request_id}/{next(self._numbers)}"
        stream = self._streams[name] = asyncio.Queue()
        finished = False
        try:
            await self._do(lambda: self._submit(msgspec.structs.replace(request, request_id=name)))
            while not finished:
                chunk = await stream.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                finished = chunk.finish_reason is not None
                yield msgspec.structs.replace(chunk, request_id=request_id)
        finally:
            del self._streams[name], self._names[request_id]
            if not finished:
                with contextlib.suppress(EngineUnavailable):
                    self._post(lambda: self._abort([name]))

    async def abort(self, request_ids: list[str]) -> None:
        names = [self._names[request_id] for request_id in request_ids if request_id in self._names]
        await self._do(lambda: self._abort(names))

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        await self._do(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self._do(self._resume)

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        await self._do(lambda: self._update_weights(snapshot, version))

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        return await self._do(lambda: self._export_kv(np.frombuffer(token_ids, np.int32)))

    async def import_kv(self, handle: KVHandle) -> int:
        return await self._do(lambda: self._import_kv(handle))

    async def release(self, handle_id: str) -> None:
        await self._do(lambda: self._release(handle_id))

    async def offload(self) -> None:
        await self._do(self._offload)

    async def restore(self, snapshot: Exposure, version: int) -> None:
        await self._do(lambda: self._restore(snapshot, version))

    def capacity(self) -> Capacity:
        """As of the last iteration."""
        core = self._core
        return Capacity(0, 0) if core is None else Capacity(len(core.running), len(core.waiting))

    def stats(self) -> EngineStats:
        core = self._core
        counts = self._totals if core is None else _add_counts(self._totals, core)
        return msgspec.structs.replace(counts, busy_s=self._busy_s, failure=self._failure)

    async def close(self) -> None:
        """Stop the thread and free everything; running calls end with EngineUnavailable. Twice is harmless."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, self.config.command_deadline_s)

    # Below: the engine thread.

    def _run(self) -> None:
        torch.set_num_threads(self.config.num_threads)
        reason = "the engine was closed"
        try:
            while not self._closed:
                self._take_commands()
                if not self._is_idle():
                    started = time.perf_counter()
                    self._deliver(self._need_core().iterate())
                    self._busy_s += time.perf_counter() - started
        except Exception as error:  # the thread's outermost frame: it records, and ends every call with the reason
            log.exception("engine_failed")
            self._failure = reason = f"the engine failed: {error!r}"
        self._stop(self._failure or reason)

    def _stop(self, reason: str) -> None:
        with self._wake:
            self._closed = True
        while self._commands:
            self._commands.popleft()()
        self._tell(self._fail_streams, EngineUnavailable(reason))
        for handle_id in list(self._pinned):
            self._release(handle_id)
        self._core = None

    def _take_commands(self) -> None:
        """Run the commands that have come; wait for one when there is nothing else to do."""
        self._expire_pins()
        with self._wake:
            if not self._commands and not self._closed and self._is_idle():
                self._wake.wait(self.config.pin_deadline_s if self._pinned else None)
        while self._commands:
            self._commands.popleft()()

    def _is_idle(self) -> bool:
        return self._core is None or self._paused or not self._core.has_work()

    def _submit(self, request: GenerateRequest) -> None:
        self._need_core().submit(request)

    def _abort(self, request_ids: list[str]) -> None:
        if self._core is not None:
            self._core.abort(request_ids)
            self._deliver(self._core.take_chunks())

    def _pause(self, mode: Literal["keep", "abort"]) -> None:
        self._paused = True
        if self._core is not None:
            if mode == "abort":
                self._core.abort_all()
            self._core.flush()
            self._deliver(self._core.take_chunks())

    def _resume(self) -> None:
        self._paused = False

    def _update_weights(self, snapshot: Exposure, version: int) -> None:
        core, parameters = self._need_core(), self._transport.read(snapshot)
        if ADAPTER in parameters:
            base = self._base.arrays()
            core.load_weights_by(merging(base, parameters), base, version)
        else:
            core.load_weights(parameters, version)
        self._prove(core, parameters)
        self._deliver(core.take_chunks())

    def _export_kv(self, token_ids: np.ndarray) -> KVHandle | None:
        core = self._need_core()
        num_tokens, regions = core.export_regions(token_ids)
        if not num_tokens:
            return None
        known = np.ascontiguousarray(token_ids[:num_tokens])
        exposure = self._transport.expose({TOKENS: known} | regions, version=core.version, incarnation=KV_INCARNATION)
        handle_id = f"{exposure.location}/{next(self._numbers)}"
        self._pinned[handle_id] = exposure, time.monotonic() + self.config.pin_deadline_s
        return KVHandle(handle_id, exposure, num_tokens, self._fingerprint(), core.version)

    def _import_kv(self, handle: KVHandle) -> int:
        core = self._need_core()
        if handle.fingerprint != self._fingerprint():
            raise KVRefused(f"KV of layout {handle.fingerprint}, this engine has {self._fingerprint()}")
        if handle.version != core.version:
            raise KVRefused(f"KV of version {handle.version}, this engine has {core.version}")
        token_ids = np.empty(handle.num_tokens, np.int32)
        self._transport.read(handle.exposure, {TOKENS: token_ids})
        return core.import_blocks(token_ids, lambda into: self._transport.read(handle.exposure, into))

    def _release(self, handle_id: str) -> None:
        if pinned := self._pinned.pop(handle_id, None):
            self._transport.release(pinned[0])

    def _expire_pins(self) -> None:
        now = time.monotonic()
        for handle_id in [handle_id for handle_id, (_, deadline) in self._pinned.items() if deadline < now]:
            log.warning("kv_pin_expired", extra={"handle": handle_id})
            self._release(handle_id)

    def _offload(self) -> None:
        if self._core is None:
            return
        if self._core.has_work():
            raise EngineError(f"{len(self._core.running) + len(self._core.waiting)} calls are running: abort them first")
        self._core.weights.release()
        self._totals, self._core = _add_counts(self._totals, self._core), None
        if self.device != HOST:
            torch.cuda.empty_cache()  # what torch keeps of it would be missing to the trainer of another process

    def _restore(self, snapshot: Exposure, version: int) -> None:
        if self._core is not None:
            self._update_weights(snapshot, version)
            return
        core = EngineCore(self.spec, self.config, version=version, device=self.device)
        like = placeholders(snapshot)
        if ADAPTER in like:
            base, parameters = self._base.arrays(), self._transport.read(snapshot)
            core.fill_weights(merging(base, parameters), base)
            self._prove(core, parameters)
            self._core = core
            return
        core.fill_weights(lambda into: self._transport.read(snapshot, into), like)
        self._prove(core, self._transport.read(snapshot, {PROBE: np.empty(like[PROBE].shape, np.uint8)}) if PROBE in like else {})
        self._core = core

    def _prove(self, core: EngineCore, parameters: Mapping[str, np.ndarray]) -> None:
        """By the probe that came with them. An engine that fails it ends: it serves nothing more."""
        probe = probe_in(parameters)
        if probe is None:
            log.warning("weights_without_probe", extra={"version": core.version})
            return
        try:
            core.prove(probe)
        except EngineError as error:
            self._failure, self._closed = str(error), True
            raise

    def _need_core(self) -> EngineCore:
        if self._core is None:
            raise EngineUnavailable("the engine is offloaded")
        return self._core

    def _fingerprint(self) -> str:
        return self.spec.fingerprint(self.config.block_size)

    # Below: between the threads.

    async def _do(self, command: Callable[[], Result]) -> Result:
        """Run `command` in the engine thread between two iterations and return its result or raise its error."""
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> None:
            try:
                if self._closed:
                    raise EngineUnavailable("the engine is closed")
                result = command()
            except QwenGyreError as error:
                self._tell(_fail, future, error)
            except BaseException as error:
                self._tell(_fail, future, EngineUnavailable(f"the engine failed: {error!r}"))
                raise
            else:
                self._tell(_finish, future, result)

        self._post(run)
        try:
            return await asyncio.wait_for(future, self.config.command_deadline_s)
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {self.config.command_deadline_s} s") from None

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            self._commands.append(command)
            self._wake.notify()

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        if chunks:
            self._tell(self._hand_out, chunks)

    def _hand_out(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if stream := self._streams.get(chunk.request_id):
                stream.put_nowait(chunk)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _fail_streams(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)


def _finish(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _add_counts(totals: EngineStats, core: EngineCore) -> EngineStats:
    counts = core.counts
    return EngineStats(
        tokens_generated=totals.tokens_generated + counts.tokens_generated,
        tokens_prefilled=totals.tokens_prefilled + counts.tokens_prefilled,
        tokens_cached=totals.tokens_cached + counts.tokens_cached,
        tokens_recomputed_at_publish=totals.tokens_recomputed_at_publish + counts.tokens_recomputed_at_publish,
        tokens_imported=totals.tokens_imported + counts.tokens_imported,
        busy_s=totals.busy_s,
    )
