"""How vLLM is started for a cell: its arguments, its environment, and what makes two engines' blocks interchangeable."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from qwengyre.config.installation import to_have_vllm
from qwengyre.core.errors import ConfigError, ModelRefused
from qwengyre.engines.config import EngineConfig
from qwengyre.models.config_file import read_config_file
from qwengyre.models.follow import sentence
from qwengyre.models.load import read_config

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

BACKEND = "qwengyre"
"""vLLM's name for the way in which weights come (`transfer.py`)."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""The first version of vLLM's model runner is the one that runs on CPU and GPU alike."""
CONNECTOR = {
    "kv_connector": "GyreConnector",
    "kv_connector_module_path": "qwengyre.engines.vllm.connector",
    "kv_role": "kv_both",
}
SLACK_BYTES = 1 << 28
"""vLLM wants to be told of enough memory for a call; what it takes is `kv_blocks`."""


class Launched(NamedTuple):
    llm: AsyncLLM
    moves: bool
    """Whether keys and values can be exported and imported: not those of a model that has recurrent states beside them."""


def require_vllm() -> None:
    """Raises ConfigError when vLLM is not installed in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed here: {to_have_vllm()}",
            key="engine.engine",
        )


def start(model_dir: Path, config: EngineConfig) -> Launched:
    """vLLM for this model, in processes that end with this one: engine core and worker in one, or a worker for each device.

    Raises ConfigError for a block size that its kernels do not know, ModelRefused for a model that it does not serve.
    """
    if config.block_size % 32 and not torch.cuda.is_available():
        raise ConfigError(f"vLLM on a CPU needs a multiple of 32, not {config.block_size}", key="engine.block_size")
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.version import __version__

    try:
        args = _arguments(model_dir, config)
        is_hybrid = args.create_model_config().is_hybrid
        args.enable_prefix_caching = not is_hybrid
        if not is_hybrid:
            from vllm.config import KVTransferConfig

            args.kv_transfer_config = KVTransferConfig(**CONNECTOR)
        vllm_config = args.create_engine_config()
        if not torch.cuda.is_available() and torch.get_num_threads() == 1:
            # vLLM would start fresh interpreters, whose imports take longer than everything else on a small machine.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return Launched(AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True), moves=not is_hybrid)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise ModelRefused(
            f'{model_dir}: vLLM {__version__} does not serve this model: {sentence(error)}; take engine.engine = "embedded",'
            " or another version of vLLM"
        ) from error


def _arguments(model_dir: Path, config: EngineConfig) -> AsyncEngineArgs:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from qwengyre.engines.vllm.executors import InCore, InProcesses

    on_gpu = torch.cuda.is_available()
    return AsyncEngineArgs(
        model=str(model_dir),
        dtype=config.dtype,
        max_model_len=config.max_context_tokens,
        max_num_seqs=config.max_running,
        max_num_batched_tokens=config.prefill_chunk + config.max_running,
        block_size=config.block_size,
        num_gpu_blocks_override=config.kv_blocks,
        kv_cache_memory_bytes=2 * kv_bytes(model_dir, config) + SLACK_BYTES,
        tensor_parallel_size=config.tensor_parallel,
        language_model_only=True,
        skip_tokenizer_init=True,
        enforce_eager=not on_gpu,
        enable_sleep_mode=on_gpu,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,
        generation_config="vllm",
        disable_log_stats=True,
        distributed_executor_backend=InCore if config.tensor_parallel == 1 else InProcesses,
        worker_extension_cls="qwengyre.engines.vllm.worker.WorkerExtension",
        weight_transfer_config={"backend": BACKEND},
    )


def kv_bytes(model_dir: Path, config: EngineConfig) -> int:
    """Memory of all blocks of all devices, about: of models with several kinds of layers as if all were attention."""
    model = text_config(model_dir)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    per_token: int = 2 * model.num_hidden_layers * heads * width * item_bytes(config)
    return config.kv_blocks * config.block_size * per_token


def text_config(model_dir: Path) -> Any:
    """transformers' config of the model's text part. Raises ConfigError."""
    return read_config(model_dir).get_text_config()


def item_bytes(config: EngineConfig) -> int:
    return 4 if config.dtype == "float32" else 2


def fingerprint(model_dir: Path, config: EngineConfig) -> str:
    """Equal for two engines exactly when one can read the blocks of the other: vLLM lays them out as its kernels like them.

    Rank r of one reads what rank r of the other exposed.
    """
    from vllm.version import __version__

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"cpu {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    model = msgspec.json.encode(read_config_file(model_dir), order="sorted").decode()
    text = f"vllm {__version__} {device} {config.dtype} block={config.block_size} ranks={config.tensor_parallel} {model}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
