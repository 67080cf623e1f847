"""Settings of an engine: the `[engine]` table of a run file."""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.core.ids import LocalPath, ModelName, Url


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a cell serves calls. The defaults suit a model of about a million parameters on one core."""

    engine: Literal["embedded", "vllm", "paced", "served"] = "embedded"
    """`embedded`: torch in the cell's process. `vllm`: vLLM beside it, on a GPU or a CPU (docs/engines.md).
    `paced`: scripted tokens at the speed of an emulated device. `served`: a server elsewhere, whose model is evaluated, never trained."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """`vllm` only: of weights, keys and values inside the engine."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """`embedded` only: where it keeps weights, keys and values, and computes, in float32. `auto`: the first CUDA device, or the processor
    when there is none. Serving on CUDA has not been run. vLLM takes the devices that it finds."""
    tensor_parallel: int = 1
    """`vllm` only: devices over which each matrix is split; on a CPU, processes."""
    paced_plan: LocalPath = LocalPath("")
    """`paced` only: the file that says what everything takes (`qwengyre bench elastic` writes it)."""
    url: Url = Url("")
    """`served` only: base URL of an OpenAI-compatible server that knows token ids, as vLLM does, such as http://host:8000/v1. Its key is
    taken from QWENGYRE_ENGINE_KEY."""
    served_as: ModelName = ModelName("")
    """`served` only: the model's name at that server."""
    max_running: int = 16
    """Calls that decode together; the others wait."""
    max_waiting: int = 256
    """Calls that may wait; one more is refused with EngineUnavailable, so that the gateway holds it."""
    max_context_tokens: int = 2048
    """Prompt and output of one call together."""
    block_size: int = 16
    """Tokens in one block of keys and values."""
    kv_blocks: int = 4096
    """Blocks, of running calls and of known prefixes together. Memory is taken when a block is first used."""
    prefill_chunk: int = 512
    """Most prompt tokens that one iteration computes, so that decoding calls wait no longer than that."""
    stream_interval: int = 8
    """Tokens of one call that are sent together. Aborts, ends and publishes send what there is."""
    state_snapshots: int = 64
    """Of models with recurrent layers: states of known prefixes that are kept beside those of running calls."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """`native`: C, built at first use, for small models on one thread of the processor. `auto`: native where it can be, else torch."""
    num_threads: int = 1
    """Threads of torch inside the engine."""
    command_deadline_s: float = 120.0
    """Longest wait for the engine's thread to take a command; then EngineUnavailable."""
    pin_deadline_s: float = 60.0
    """Exported KV that nobody has released after this long is freed."""

    def __post_init__(self) -> None:
        if (self.engine == "paced") != bool(self.paced_plan):
            raise ValueError("paced_plan: the paced engine needs a plan, and no other engine takes one")
        if (self.engine == "served") != bool(self.url and self.served_as):
            raise ValueError("url: the served engine needs url and served_as, and no other engine takes them")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} is not a URL: expected http:// or https://")
        if self.dtype != "float32" and self.engine != "vllm":
            raise ValueError(f'dtype {self.dtype!r} needs engine = "vllm"; the others compute in float32')
        if self.tensor_parallel != 1 and self.engine != "vllm":
            raise ValueError('tensor_parallel needs engine = "vllm"; the others compute in one process')
        if self.device != "cpu" and self.engine != "embedded":
            raise ValueError(
                f'device {self.device!r} needs engine = "embedded": vLLM finds its devices itself, the others have none'
            )
        if self.device == "cuda" and self.kernels == "native":
            raise ValueError('kernels: the compiled ones are for the processor: with device = "cuda" take "auto" or "torch"')
        positive = (
            "tensor_parallel",
            "max_running",
            "max_waiting",
            "block_size",
            "prefill_chunk",
            "stream_interval",
            "num_threads",
            "kv_blocks",
            "state_snapshots",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        if self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens must be at least 2, is {self.max_context_tokens}")
        if self.kv_blocks * self.block_size < self.max_context_tokens + self.block_size:
            least = -(-self.max_context_tokens // self.block_size) + 1
            raise ValueError(f"kv_blocks must be at least {least} to hold one call of max_context_tokens, is {self.kv_blocks}")
        for name in ("command_deadline_s", "pin_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, is {getattr(self, name)}")
