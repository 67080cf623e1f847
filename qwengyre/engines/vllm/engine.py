"""vLLM behind `engines.api.CellEngine`: an adapter over `AsyncLLM`, the same on a GPU and on a CPU.

    event loop of the cell                     vLLM's process
      generate -> VLLMCall <- AsyncLLM  <--->    engine core (scheduler, GyreConnector)
      update_weights, export_kv ...     ---->    worker, or one for each device (WorkerExtension, SnapshotTransfer,
                                                 KeyedSampler, GyreConnector)

Bulk data never passes the event loop: the worker reads snapshots and keys and values through a transport of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec
import numpy as np

from qwengyre.core.errors import ContextOverflow, EngineError, EngineUnavailable, KVRefused, QwenGyreError
from qwengyre.engines.api import Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.vllm import launch
from qwengyre.engines.vllm.calls import VLLMCall
from qwengyre.engines.vllm.imports import Imports
from qwengyre.engines.vllm.messages import Reply, Setup
from qwengyre.engines.vllm.process import VLLMProcess
from qwengyre.engines.vllm.sampling import sampling_params
from qwengyre.models.probe import Probe
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.transports import TransportPlace

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)


class VLLMEngine:
    """A model in vLLM. Starts with the weights of `model_dir` as version 0.

    `place` is where the cell's transport was opened: the worker opens its own there.
    """

    def __init__(self, model_dir: Path, config: EngineConfig, place: TransportPlace):
        """Raises ConfigError, ModelRefused for a model that vLLM does not serve."""
        self.config, self.model_dir = config, model_dir
        self.vocabulary: int = launch.text_config(model_dir).vocab_size
        self.version = 0
        self._process = VLLMProcess(model_dir, config, self._fail)
        self._fingerprint = launch.fingerprint(model_dir, config)
        self._setup: Setup | None = Setup(str(model_dir), self._fingerprint, place)
        self._exclusive = asyncio.Lock()
        """Held by operations that must not overlap: setup, publishes, offload, restore."""
        self._calls: dict[str, VLLMCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._imports = Imports(launch.kv_bytes(model_dir, config) // 4)
        self._pins: dict[str, asyncio.TimerHandle] = {}
        self._numbers = itertools.count()
        self._paused = self._offloaded = self._withheld = self._has_no_cache = False
        self._failure: str | None = None
        self._counts = EngineStats(0, 0, 0, 0, 0, 0.0)
        self._busy_since = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        call = self._accept(request)
        pump: asyncio.Task[None] | None = None
        finished = False
        try:
            await self._ready()
            self._need_memory()
            pump = asyncio.create_task(self._pump(call), name=call.name)
            self._tasks.add(pump)
            pump.add_done_callback(self._tasks.discard)
            while not finished:
                chunk = await call.chunks.get()
                if isinstance(chunk, EngineError):
                    finished = True
                    raise chunk
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            self._forget(call)
            if not finished and pump is not None and self._failure is None:
                await self._process.llm.abort(call.name)
                pump.cancel()

    async def abort(self, request_ids: list[str]) -> None:
        await self._ready()
        await self._abort([call for request_id in request_ids if (call := self._calls.get(request_id))])

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        await self._ready()
        if mode == "abort":
            await self._abort(list(self._calls.values()))
        await self._hold()
        self._paused = True

    async def resume(self) -> None:
        await self._ready()
        self._paused = False
        await self._process.go_on()

    async def update_weights(self, snapshot: Exposure, version: int) -> None:
        """Raises EngineError, and serves no more, when a probe shows that the engine does not compute with these weights."""
        await self._ready()
        self._need_memory()
        async with self._exclusive:
            await self._load(snapshot, version)

    async def export_kv(self, token_ids: bytes) -> KVHandle | None:
        await self._ready()
        self._need_memory()
        if not self._process.moves:
            return None
        name = f"{secrets.token_hex(8)}/{next(self._numbers)}"
        by_rank = [reply.handle for reply in await self.ask_worker("qg_export_kv", token_ids, self.version, name)]
        if (first := by_rank[0]) is None:
            return None
        others = tuple(handle.exposure for handle in by_rank[1:] if handle is not None)
        self._pins[name] = asyncio.get_running_loop().call_later(self.config.pin_deadline_s, self._expire, name)
        return msgspec.structs.replace(first, exposure=msgspec.structs.replace(first.exposure, others=others))

    async def import_kv(self, handle: KVHandle) -> int:
        await self._ready()
        self._need_memory()
        if handle.fingerprint != self._fingerprint:
            raise KVRefused(f"KV of layout {handle.fingerprint}, this engine has {self._fingerprint}")
        if handle.version != self.version:
            raise KVRefused(f"KV of version {handle.version}, this engine has {self.version}")
        if not self._process.moves:
            raise KVRefused("keys and values alone do not tell what this model's recurrent layers know")
        if self._imports.has(handle.handle_id):
            return handle.num_tokens
        reply = (await self.ask_worker("qg_import_kv", msgspec.msgpack.encode(handle)))[0]
        self._forget_imports(self._imports.add(handle, np.frombuffer(reply.token_ids, np.int32)))
        self._count(tokens_imported=handle.num_tokens)
        return handle.num_tokens

    async def release(self, handle_id: str) -> None:
        await self._ready()
        if timer := self._pins.pop(handle_id, None):
            timer.cancel()
            await self.ask_worker("qg_release", handle_id)

    async def offload(self) -> None:
        await self._ready()
        async with self._exclusive:
            if self._offloaded:
                return
            if self._calls:
                raise EngineError(f"{len(self._calls)} calls are running: abort them first")
            self._offloaded = True
            await self._hold(clear_cache=True)
            self._imports.clear()
            await self.ask_worker("qg_offload")

    async def restore(self, snapshot: Exposure, version: int) -> None:
        await self._ready()
        async with self._exclusive:
            if self._offloaded:
                await self.ask_worker("qg_wake", "weights")
                self._has_no_cache = True
            self._paused = self._paused and not self._offloaded
            self._offloaded = False
            await self._load(snapshot, version)

    def capacity(self) -> Capacity:
        running = min(len(self._calls), self.config.max_running)
        return Capacity(running, len(self._calls) - running)

    def stats(self) -> EngineStats:
        busy_s = time.monotonic() - self._busy_since if self._calls else 0.0
        return msgspec.structs.replace(self._counts, busy_s=self._counts.busy_s + busy_s, failure=self._failure or "")

    async def close(self) -> None:
        """End vLLM's processes; running calls end with EngineUnavailable. Twice is harmless."""
        if self._failure is None and self._setup is None:
            with contextlib.suppress(EngineError):
                await self.ask_worker("qg_close")
        self._fail("the engine is closed")
        for timer in self._pins.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await self._process.close()

    @property
    def core_pid(self) -> int:
        """Process of vLLM's engine core and worker."""
        return self._process.pid

    async def ask_worker(self, method: str, *arguments: object) -> list[Reply]:
        """Call a method of `WorkerExtension` on every rank. Raises what it raised; EngineUnavailable when nobody answers."""
        return await self._process.ask(method, *arguments)

    # Calls.

    def _accept(self, request: GenerateRequest) -> VLLMCall:
        self._need_memory()
        if request.request_id in self._calls:
            raise EngineUnavailable(f"request {request.request_id} is running already")
        call = VLLMCall(request, f"{request.request_id}/{next(self._numbers)}")
        limit = self.config.max_context_tokens
        if not 0 < len(call.prompt) < limit:
            raise ContextOverflow(num_tokens=len(call.prompt), max_tokens=limit - 1)
        if call.prompt.min() < 0 or call.prompt.max() >= self.vocabulary:
            raise EngineError(f"token ids lie in 0..{self.vocabulary - 1}: {call.prompt.min()}..{call.prompt.max()}")
        if request.sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, is {request.sampling.max_tokens}")
        if len(self._calls) >= self.config.max_running + self.config.max_waiting:
            raise EngineUnavailable(f"{self.config.max_waiting} calls are waiting, the most this engine takes")
        if not self._calls:
            self._busy_since = time.monotonic()
        self._calls[request.request_id] = call
        return call

    async def _pump(self, call: VLLMCall) -> None:
        """Take what vLLM makes for one call."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        call.named_import = self._imports.name_longest(call.prompt[:-1])
        room = self.config.max_context_tokens - len(call.prompt)
        params = sampling_params(call.request.sampling, room, call.named_import)
        try:
            async for output in self._process.llm.generate({"prompt_token_ids": call.prompt.tolist()}, params, call.name):
                await self._take(call, output)
        except (EngineDeadError, EngineGenerateError) as error:
            self._fail(f"vLLM's process is gone: {error}")
        except ValueError as error:
            call.fail(EngineError(f"vLLM refuses the call: {error}"))
        finally:
            if call.named_import is not None and self._failure is None:
                self._forget_imports(self._imports.given_up(call.named_import))

    async def _take(self, call: VLLMCall, output: RequestOutput) -> None:
        made = output.outputs[0]
        if not call.num_tokens and made.token_ids:
            self._started(call, output.num_cached_tokens or 0)
        call.add(made.token_ids, [of[token].logprob for of, token in zip(made.logprobs or (), made.token_ids, strict=True)])
        self._count(tokens_generated=len(made.token_ids))
        call.finish_reason, call.spans = made.finish_reason, made.weight_versions
        if call.is_over or call.num_unsent >= self.config.stream_interval:
            self._send(call)
        elif call.is_aborted:
            await self._process.llm.abort(call.name)  # the abort came before vLLM knew the call

    def _started(self, call: VLLMCall, num_cached: int) -> None:
        call.cached = num_cached
        self._count(tokens_cached=num_cached, tokens_prefilled=len(call.prompt) - num_cached)
        if call.named_import is not None:
            named, call.named_import = call.named_import, None
            self._forget_imports(self._imports.started(named))

    def _forget_imports(self, import_ids: list[str]) -> None:
        if import_ids:
            self._later(self.ask_worker("qg_forget_imports", import_ids))

    def _later(self, work: Coroutine[None, None, object]) -> None:
        """Without waiting for it. When vLLM is gone, so is the need for it."""

        async def do() -> None:
            with contextlib.suppress(EngineError):
                await work

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, call: VLLMCall) -> None:
        if self._withheld:
            return
        call.send(self.version)
        if call.is_over:
            self._forget(call)
            if not call.versions_agree():
                self._fail(f"call {call.request.request_id}: chunks say {call.versions}, vLLM says {call.spans}")

    def _forget(self, call: VLLMCall) -> None:
        if self._calls.get(call.request.request_id) is call:
            del self._calls[call.request.request_id]
            if not self._calls:
                self._count(busy_s=time.monotonic() - self._busy_since)

    async def _abort(self, calls: list[VLLMCall]) -> None:
        """Between two tokens, so that none is lost and what is known of a call is what vLLM has computed."""
        async with self._exclusive:
            await self._hold()
            for call in calls:
                call.is_aborted = True
            await self._process.abort([call.name for call in calls])
            await self._go_on()

    # Weights.

    async def _load(self, snapshot: Exposure, version: int) -> None:
        await self._hold()
        try:
            received = await self._process.load(msgspec.msgpack.encode(snapshot), version)
        except QwenGyreError:
            if not self._has_no_cache:
                await self._go_on()  # nothing was changed
            raise
        self.version = version
        for rank, reply in enumerate(received):
            if reply.missed:
                more = f" and {len(reply.missed) - 3} more" if len(reply.missed) > 3 else ""
                self._end(f"vLLM's loaders passed over {', '.join(reply.missed[:3])}{more} (rank {rank}) of version {version}")
        if not received[0].probe:
            self._end(f"the snapshot of version {version} has no probe: nothing shows that vLLM computes with its weights")
        self._count(tokens_recomputed_at_publish=sum(call.num_computed for call in self._calls.values()))
        if self._has_no_cache:
            await self.ask_worker("qg_wake", "kv_cache")
            self._has_no_cache = False
        await self._hold(clear_cache=True)
        self._imports.clear()
        await self._prove(msgspec.msgpack.decode(received[0].probe, type=Probe))
        await self._go_on()

    async def _prove(self, probe: Probe) -> None:
        """Let the engine compute the probe; whatever else it makes meanwhile leaves only if the probe is right."""
        self._withheld = True
        await self._process.go_on()
        found = await self._process.logprobs(probe.token_ids[: self.config.max_context_tokens - 1])
        await self._process.hold()
        if reason := probe.refusal(found, self.config.dtype):
            self._end(f"vLLM does not compute with the weights of version {self.version}: {reason}")
        self._withheld = False
        self._send_all()

    def _end(self, reason: str) -> NoReturn:
        self._fail(reason)
        raise EngineError(reason)

    # vLLM's process.

    async def _ready(self) -> None:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if self._setup is not None:
            async with self._exclusive:
                if self._setup is not None:
                    await self._process.set_up(self._setup)
                    await self._prove(await asyncio.to_thread(_probe_of_folder, self.model_dir))
                    await self._go_on()
                    self._setup = None

    async def _hold(self, *, clear_cache: bool = False) -> None:
        """Stop between two tokens, and send what was made until now."""
        await self._process.hold(clear_cache=clear_cache)
        self._send_all()

    async def _go_on(self) -> None:
        if not self._paused:
            await self._process.go_on()

    def _send_all(self) -> None:
        for call in list(self._calls.values()):
            self._send(call)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._counts = msgspec.structs.replace(self._counts, failure=reason)
            log.info("engine_ends", extra={"reason": reason})
            for call in list(self._calls.values()):
                call.fail(EngineUnavailable(reason))

    def _expire(self, handle_id: str) -> None:
        log.warning("kv_pin_expired", extra={"handle": handle_id})
        self._later(self.release(handle_id))

    def _need_memory(self) -> None:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if self._offloaded:
            raise EngineUnavailable("the engine is offloaded")

    def _count(self, **more: float) -> None:
        counts = {name: getattr(self._counts, name) + number for name, number in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **counts)


def _probe_of_folder(model_dir: Path) -> Probe:
    """What transformers computes with the weights that vLLM has started with."""
    import torch

    from qwengyre.models.load import load
    from qwengyre.models.rounding import probe_of

    return probe_of(load(model_dir, torch.float32))
