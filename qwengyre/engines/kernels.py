"""Which implementation of `Forward` serves a model."""

from __future__ import annotations

from qwengyre.core.errors import ConfigError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights
from qwengyre.engines.native.forward import NativeForward, is_supported
from qwengyre.engines.passes import Forward
from qwengyre.engines.torch_forward import TorchForward

NATIVE_HIDDEN = 512
"""Wider models are served by torch, whose matrix products use all threads and caches better."""


def make_forward(config: EngineConfig, weights: EngineWeights, memory: KVMemory) -> Forward:
    """The kernels of the config. Raises ConfigError when native ones are demanded and cannot be had."""
    is_small = weights.spec.hidden <= NATIVE_HIDDEN and config.num_threads == 1
    if config.kernels == "torch" or (config.kernels == "auto" and not is_small):
        return TorchForward(weights, memory)
    if is_supported(weights.spec):
        return NativeForward(weights, memory)
    if config.kernels == "native":
        raise ConfigError("no C compiler, or a model shape that the kernels lack; use 'auto' or 'torch'", key="engine.kernels")
    return TorchForward(weights, memory)
