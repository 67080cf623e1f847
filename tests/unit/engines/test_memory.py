"""What an engine's memory does: moves whole, and goes back to the system."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from qwengyre.core.errors import ModelRefused, StaleRead
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import read_spec
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.transfer.tcp import TcpTransport


@pytest.mark.parametrize("num_more", [0, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_any_blocks_can_be_exposed_and_read_into_any_others(tmp_path: Path, stride: int, num_more: int):
    spec = read_spec(write_tiny_qwen3(tmp_path))
    source, destination = (KVMemory(spec, num_blocks=80, block_size=8) for _ in range(2))
    generator = np.random.default_rng(0)
    source.blocks.numpy()[:] = generator.normal(size=source.blocks.shape)
    sent = [*range(40, 50), *generator.permutation(40)[:20].tolist()]
    kept = list(range(3, 3 + stride * (30 - num_more), stride))
    transport = TcpTransport()
    transport.read(
        transport.expose(source.regions(sent), version=0, incarnation=0), into=destination.landing(kept, num_more=num_more)
    )
    transport.close()
    np.testing.assert_array_equal(destination.blocks[:, kept].numpy(), source.blocks[:, sent[: len(kept)]].numpy())


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


async def test_offload_gives_the_memory_back_to_the_system(tmp_path: Path):
    model_dir = write_tiny_qwen3(tmp_path)
    num_bytes = 64 << 20

    transport = TcpTransport()
    spec = read_spec(model_dir)
    per_block = 4 * spec.num_layers * 2 * spec.kv_heads * 16 * spec.head_dim
    config = EngineConfig(kv_blocks=num_bytes // per_block)
    engine = EmbeddedEngine(model_dir, transport, config)
    prompt = GenerateRequest("a", np.arange(40, dtype=np.int32).tobytes(), Sampling(1.0, 4, (), 0))
    assert [chunk async for chunk in engine.generate(prompt)]
    assert engine._core is not None
    engine._core.memory.blocks.fill_(1.0)
    before = resident_bytes()
    await engine.offload()
    assert before - resident_bytes() > 0.9 * num_bytes
    await engine.close()
    transport.close()


async def test_kv_that_nobody_releases_is_readable_until_its_deadline_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model_dir = write_tiny_qwen3(tmp_path)

    transport = TcpTransport()
    engine = EmbeddedEngine(model_dir, transport, EngineConfig(kv_blocks=256, pin_deadline_s=3600.0))
    prompt = GenerateRequest("a", np.arange(40, dtype=np.int32).tobytes(), Sampling(1.0, 4, (), 0))
    assert [chunk async for chunk in engine.generate(prompt)]
    handle = await engine.export_kv(prompt.token_ids)
    assert handle is not None
    await engine.offload()
    await engine.release("unknown")
    assert transport.read(handle.exposure)
    now = time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: now() + 3600.0)
    with pytest.raises(StaleRead):
        while True:  # the engine looks at the time between two commands
            await engine.release("unknown")
            transport.read(handle.exposure)
    await engine.close()
    transport.close()


def test_two_engines_share_kv_only_when_model_and_layout_are_the_same(tmp_path: Path):
    spec = read_spec(write_tiny_qwen3(tmp_path / "a"))
    assert spec.fingerprint(16) == read_spec(write_tiny_qwen3(tmp_path / "b", seed=1)).fingerprint(16)
    others = [spec.fingerprint(8)] + [
        read_spec(write_tiny_qwen3(tmp_path / name, **{name: value})).fingerprint(16)
        for name, value in {"num_hidden_layers": 3, "head_dim": 8, "num_key_value_heads": 4, "rope_theta": 5000.0}.items()
    ]
    assert len({spec.fingerprint(16), *others}) == 6


def test_a_model_with_recurrent_states_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ModelRefused, match="qwen3_next"):
        read_spec(write_tiny_qwen3(tmp_path, model_type="qwen3_next"))
