"""The compiled kernels against the torch operations, number by number."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest import LogCaptureFixture as Caplog

from qwengyre.core.errors import ConfigError, EngineError, ModelRefused
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.calls import Call, PromptPiece, make_pass
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.kernels import make_forward
from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights, read_spec, read_weights
from qwengyre.engines.native.build import library
from qwengyre.engines.torch_forward import TorchForward
from qwengyre.testing.engines import write_tiny_qwen3
from tests.unit.engines.exact import relative_rounding, rms

SHAPES = [
    {},
    {"head_dim": 64, "num_key_value_heads": 1, "hidden_size": 80, "intermediate_size": 208, "vocab_size": 131},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 64},
]


def a_pass(vocabulary: int, block_size: int):
    """Three decoding calls of different lengths and two pieces, blocks scattered over the memory."""
    generator = np.random.default_rng(0)
    table = generator.permutation(40).reshape(5, 8)
    calls = []
    for slot, size in enumerate((1, 17, 90, 30, 64)):
        tokens = generator.integers(0, vocabulary, 128).astype(np.int32)
        calls.append(Call(f"r{slot}", Sampling(0.7 + 0.3 * slot, 5, (), slot), tokens, size, size, 128, slot=slot))
    pieces = [PromptPiece(calls[3], 11, 19), PromptPiece(calls[4], 0, 40)]
    return make_pass(calls[:3], pieces, table)


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("block_size", [16, 13])
def test_kernels_and_torch_agree(tmp_path: Path, changes: dict[str, int], block_size: int):
    model_dir = write_tiny_qwen3(tmp_path, **changes)
    spec, results, contents = read_spec(model_dir), [], []
    for kernels in ("torch", "auto"):
        weights, memory = EngineWeights(spec), KVMemory(spec, num_blocks=40, block_size=block_size)
        weights.load(read_weights(model_dir))
        before = np.random.default_rng(1).normal(size=memory.blocks.shape).astype(np.float32)
        memory.blocks.copy_(torch.from_numpy(before))
        forward = make_forward(EngineConfig(kernels=kernels), weights, memory)
        assert isinstance(forward, TorchForward) == (kernels == "torch" or library() is None)
        forward.refresh()
        results.append(forward(a_pass(spec.vocabulary, block_size)))
        contents.append(memory.blocks.numpy())
    (tokens, logprobs), (native_tokens, native_logprobs) = results
    assert native_tokens == tokens
    bound = relative_rounding(spec)
    assert rms(np.subtract(native_logprobs, logprobs)) <= 2 * bound * rms(np.array(logprobs))  # of eight tokens: it varies
    is_written = contents[0] != before
    assert (is_written == (contents[1] != before)).all()
    gaps, scale = (contents[1] - contents[0])[is_written], rms(contents[0][is_written])
    assert rms(gaps) <= bound * scale and np.abs(gaps).max() <= 10 * bound * scale


def test_native_kernels_that_cannot_be_had_are_a_config_error(tmp_path: Path):
    spec = read_spec(write_tiny_qwen3(tmp_path, hidden_size=40))
    weights, memory = EngineWeights(spec), KVMemory(spec, num_blocks=4, block_size=16)
    with pytest.raises(ConfigError, match=r"engine\.kernels"):
        make_forward(EngineConfig(kernels="native"), weights, memory)
    assert isinstance(make_forward(EngineConfig(), weights, memory), TorchForward)


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_a_user_who_can_keep_no_binary_is_served_by_torch(monkeypatch: pytest.MonkeyPatch, caplog: Caplog, home: str | None):
    """In a container a user may have no home, or one that it may not write to."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: home or path)
    with caplog.at_level("WARNING"):
        assert library.__wrapped__() is None
    assert [record.message for record in caplog.records] == ["native_kernels_missing"]


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "llama"}, {"attention_bias": True}, {"rope_parameters": {"rope_type": "yarn"}}, {"hidden_act": "gelu"}],
)
def test_a_model_that_is_not_understood_is_refused(tmp_path: Path, changes: dict[str, object]):
    model_dir = write_tiny_qwen3(tmp_path)
    config = (model_dir / "config.json").read_text()
    with pytest.raises(ModelRefused):
        read_spec(write_tiny_qwen3(tmp_path / "other", **changes))
    (model_dir / "config.json").write_text(config[:-5])
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(model_dir)


def test_a_snapshot_that_does_not_fit_is_refused_and_the_weights_stay(tmp_path: Path):
    model_dir = write_tiny_qwen3(tmp_path)
    core = EngineCore(read_spec(model_dir), EngineConfig(), version=0)
    parameters = read_weights(model_dir)
    core.load_weights(parameters, 0)
    before = core.weights.head.clone()
    for broken in ({"model.norm.weight": None}, {"model.norm.weight": np.zeros(3, np.float32)}):
        changed = {name: array for name, array in (parameters | broken).items() if array is not None}
        with pytest.raises(ModelRefused, match=r"model\.norm\.weight"):
            core.load_weights(changed, 1)
    assert core.version == 0
    assert (core.weights.head == before).all()


@pytest.mark.parametrize(("tokens", "max_tokens"), [([1, -1], 4), ([1, 96], 4), ([1, 2], 0)])
def test_requests_that_would_read_beyond_the_tables_are_refused(tmp_path: Path, tokens: list[int], max_tokens: int):
    core = EngineCore(read_spec(write_tiny_qwen3(tmp_path)), EngineConfig(), version=0)
    with pytest.raises(EngineError):
        core.submit(GenerateRequest("a", np.array(tokens, np.int32).tobytes(), Sampling(1.0, max_tokens, (), 0)))
