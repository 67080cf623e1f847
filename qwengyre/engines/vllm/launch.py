"""How vLLM is started for a cell: its arguments, its environment, and what makes two engines' blocks interchangeable."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from qwengyre.core.errors import ConfigError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.model import ModelSpec

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""The first version of vLLM's model runner is the one that runs on CPU and GPU alike."""


def require_vllm() -> None:
    """Raises ConfigError when vLLM is not installed in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here: `make setup-vllm` makes an environment of its own; run .venv-vllm/bin/qwengyre",
            key="engine.engine",
        )


def start(model_dir: Path, config: EngineConfig, spec: ModelSpec) -> AsyncLLM:
    """vLLM for this model: engine core and worker in one process of their own, a child of this one.

    Raises ConfigError for a block size that its kernels do not know.
    """
    if config.block_size % 32 and not torch.cuda.is_available():
        raise ConfigError(f"vLLM on a CPU needs a multiple of 32, not {config.block_size}", key="engine.block_size")
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    args = AsyncEngineArgs(
        model=str(model_dir),
        dtype=config.dtype,
        max_model_len=config.max_context_tokens,
        max_num_seqs=config.max_running,
        max_num_batched_tokens=config.prefill_chunk + config.max_running,
        block_size=config.block_size,
        num_gpu_blocks_override=config.kv_blocks,
        kv_cache_memory_bytes=kv_bytes(config, spec),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager=not torch.cuda.is_available(),
        enable_sleep_mode=torch.cuda.is_available(),
        logprobs_mode="processed_logprobs",
        async_scheduling=False,
        generation_config="vllm",
        disable_log_stats=True,
        distributed_executor_backend=UniProcExecutor,
        worker_extension_cls="qwengyre.engines.vllm.worker.WorkerExtension",
        kv_transfer_config={
            "kv_connector": "GyreConnector",
            "kv_connector_module_path": "qwengyre.engines.vllm.connector",
            "kv_role": "kv_both",
        },
    )
    vllm_config = args.create_engine_config()
    if not torch.cuda.is_available() and torch.get_num_threads() == 1:
        # vLLM would start a fresh interpreter, whose imports take longer than everything else on a small machine.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)


def kv_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Memory of all blocks."""
    per_token = 2 * spec.num_layers * spec.kv_heads * spec.head_dim * item_bytes(config)
    return config.kv_blocks * config.block_size * per_token


def item_bytes(config: EngineConfig) -> int:
    return 4 if config.dtype == "float32" else 2


def fingerprint(config: EngineConfig, spec: ModelSpec) -> str:
    """Equal for two engines exactly when one can read the blocks of the other: vLLM lays them out as its kernels like them."""
    from vllm.version import __version__

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"cpu {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    text = f"vllm {__version__} {device} {config.dtype} block={config.block_size} {msgspec.json.encode(spec).decode()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
