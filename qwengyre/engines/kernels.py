"""Which implementation of `Forward` serves a model."""

from __future__ import annotations

import torch

from qwengyre.core.errors import ConfigError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights, ModelSpec
from qwengyre.engines.native.forward import NativeForward, is_supported
from qwengyre.engines.passes import Forward, LoadedModel
from qwengyre.engines.torch_forward import TorchForward
from qwengyre.models.placement import HOST

NATIVE_HIDDEN = 512
"""Wider models are served by torch, whose matrix products use all threads and caches better."""


def uses_native(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether the compiled kernels serve this model. Raises ConfigError when they are demanded and cannot be had."""
    is_small = spec.hidden <= NATIVE_HIDDEN and config.num_threads == 1
    if config.kernels == "torch" or (config.kernels == "auto" and not is_small):
        return False
    if not is_supported(spec) and config.kernels == "native":
        raise ConfigError("no C compiler, or a model shape that the kernels lack; use 'auto' or 'torch'", key="engine.kernels")
    return is_supported(spec)


def make_forward(config: EngineConfig, weights: EngineWeights, memory: KVMemory) -> Forward:
    """The kernels of the config; those of torch on a device."""
    is_native = weights.device == HOST and uses_native(config, weights.spec)
    return NativeForward(weights, memory) if is_native else TorchForward(weights, memory)


def open_qwen3(spec: ModelSpec, config: EngineConfig, device: torch.device) -> LoadedModel:
    """Weights, blocks and the kernels of the config."""
    weights = EngineWeights(spec, device)
    memory = KVMemory(spec, num_blocks=config.kv_blocks, block_size=config.block_size, device=device)
    return LoadedModel(weights, memory, make_forward(config, weights, memory))
