"""Two vLLM engines for `qwengyre bench kv-move`, and the CPU time that they and this process take."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from qwengyre.engines.config import EngineConfig
from qwengyre.engines.vllm.engine import VLLMEngine
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.transports import TransportPlace

BLOCK_SIZE = 32
"""The smallest that vLLM's kernels for a CPU know."""


class VLLMPair:
    """A source and a destination, each in a process of its own."""

    def __init__(self, model_dir: Path, transport: str, prefix: str, max_context_tokens: int, calls_in_cache: int):
        torch.set_num_threads(1)
        blocks = calls_in_cache * (max_context_tokens // BLOCK_SIZE + 2)
        config = EngineConfig(engine="vllm", max_context_tokens=max_context_tokens, block_size=BLOCK_SIZE, kv_blocks=blocks)
        place = TransportPlace(msgspec.convert({"transport": transport}, TransferConfig), prefix, "127.0.0.1")
        self.source, self.destination = (VLLMEngine(model_dir, config, place) for _ in range(2))

    def others_cpu_s(self) -> float:
        """CPU seconds so far of both engines' processes, all their threads."""
        return sum(_on_cpu_s(engine.core_pid) for engine in (self.source, self.destination))

    async def placing_s(self) -> float:
        """CPU seconds so far of putting what was moved into the blocks of calls, which vLLM does when a call starts."""
        return (await self.destination.ask_worker("qg_load_cpu_s"))[0].seconds

    async def close(self) -> None:
        await self.source.close()
        await self.destination.close()


def _on_cpu_s(pid: int) -> float:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
