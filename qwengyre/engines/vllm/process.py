"""vLLM's process as the adapter sees it: every question has a deadline, and the first sign of its end ends the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from qwengyre.core.errors import EngineUnavailable, QwenGyreError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.vllm import launch
from qwengyre.engines.vllm.messages import WORKER_FAILED, Reply, Setup
from qwengyre.engines.vllm.sampling import probe_params
from qwengyre.rpc.refusal import rebuild

Answer = TypeVar("Answer")
SHUTDOWN_DEADLINE_S = 5.0  # then vLLM kills its own processes


class VLLMProcess:
    """`AsyncLLM` with deadlines. `on_end(reason)` is told once that it answers no more."""

    def __init__(self, model_dir: Path, config: EngineConfig, on_end: Callable[[str], None]):
        self.config, self._on_end = config, on_end
        self.llm, self.moves = launch.start(model_dir, config)
        self._numbers = itertools.count()

    @property
    def pid(self) -> int:
        pid: int = self.llm.engine_core.resources.engine_manager.processes[0].pid
        return pid

    async def set_up(self, setup: Setup) -> None:
        """Tell the worker who it works for, and let the kernels get ready: the first pass takes seconds."""
        await self.ask("qg_setup", msgspec.msgpack.encode(setup))
        await self._bounded(self.llm.update_weight_version("0"), "set_weight_version")

    async def ask(self, method: str, *arguments: object) -> list[Reply]:
        """Call a method of `WorkerExtension` on every rank. Raises what the first of them raised; EngineUnavailable when one does not answer."""
        answers = await self._bounded(self.llm.collective_rpc(method, args=arguments), method)
        found = [msgspec.msgpack.decode(answer, type=Reply) for answer in answers]
        for failure in (reply.failure for reply in found if reply.failure is not None):
            if failure.kind == WORKER_FAILED:
                self._on_end(f"vLLM's worker failed: {failure.message}")
                raise EngineUnavailable(failure.message)
            raise rebuild(failure)
        return found

    async def load(self, snapshot: bytes, version: int) -> list[Reply]:
        """Read a snapshot in place of the weights and label the tokens made from now on. Raises as `ask`: then nothing was changed."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        asked = WeightTransferUpdateRequest({"exposure": snapshot})
        await self._bounded(self.llm.start_weight_update(), "start_weight_update")
        await self._bounded(self.llm.update_weights(asked), "update_weights")
        try:
            received = await self.ask("qg_received")
        except QwenGyreError:
            await self._bounded(self.llm.finish_weight_update(), "finish_weight_update")
            raise
        await self._bounded(self.llm.finish_weight_update(weight_version=str(version)), "finish_weight_update")
        return received

    async def hold(self, *, clear_cache: bool = False) -> None:
        """Stop between two tokens. Until `go_on` nothing is computed; with `clear_cache` nothing computed is known."""
        await self._bounded(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache), "pause")
        await self._drain()

    async def go_on(self) -> None:
        await self._bounded(self.llm.resume_generation(), "resume")

    async def abort(self, names: Sequence[str]) -> None:
        """Returns when these requests write no more, and what they made has come."""
        await self.llm.abort(names)
        await self._bounded(self.llm.is_paused(), "abort")  # answered after the aborts
        await self._drain()

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Of each token but the first, as vLLM computes them."""
        return await self._bounded(self._logprobs(token_ids), "the probe")

    async def close(self) -> None:
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()
        await asyncio.to_thread(self.llm.shutdown, SHUTDOWN_DEADLINE_S)

    async def _logprobs(self, token_ids: Sequence[int]) -> list[float]:
        prompt = {"prompt_token_ids": list(token_ids)}
        found: list[float] = []
        async for output in self.llm.generate(prompt, probe_params(), f"probe/{next(self._numbers)}"):
            if output.prompt_logprobs is not None:
                pairs = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
                found = [of[token].logprob for of, token in pairs]
        return found

    async def _drain(self) -> None:
        """Let what vLLM has sent reach the calls."""
        while not self.llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.sleep(0)

    async def _bounded(self, question: Awaitable[Answer], what: str) -> Answer:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(self.config.command_deadline_s):
                return await question
        except TimeoutError:
            reason = f"vLLM did not answer {what} within {self.config.command_deadline_s:g} s"
        except EngineDeadError as error:
            reason = f"vLLM's process is gone: {error}"
        self._on_end(reason)
        raise EngineUnavailable(reason)
