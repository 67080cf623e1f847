"""What is published with weights of them, and engines that do not reproduce it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from qwengyre.core.errors import EngineError, EngineUnavailable
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.engines.general.model import GeneralWeights
from qwengyre.engines.served import read_served
from qwengyre.models.load import load
from qwengyre.models.probe import NUM_TOKENS, PROBE, Probe, probe_in
from qwengyre.models.rounding import probe_of
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.families import write_family
from qwengyre.trainer.checkpoint import read_published, read_weights
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmTransport
from tests.contract import test_engines as contract

FAMILIES = ("llama", "gemma3_text", "qwen3_5_text", "qwen3_moe", "deepseek_v3")
CONFIG = EngineConfig(max_running=2, max_context_tokens=128, kv_blocks=32)


@pytest.fixture
def transport(prefix: str) -> Iterator[ShmTransport]:
    transport = ShmTransport(prefix)
    yield transport
    transport.close()


def folder_of(family: str, path: Path) -> Path:
    if family == "qwen3":
        return write_tiny_qwen3(path)
    write_family(path, family)
    return path


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_an_engine_reproduces_what_the_trainer_published(family: str, tmp_path: Path, transport: ShmTransport):
    model_dir = folder_of(family, tmp_path)
    published = Trainer(model_dir, TrainerConfig(), transport).published()
    core = EngineCore(read_served(model_dir), CONFIG, version=0)
    core.load_weights(published, 1)
    probe = probe_in(published)
    assert probe is not None and len(probe.logprobs) == NUM_TOKENS
    core.prove(probe)
    assert core.cache.num_free == CONFIG.kv_blocks, "the probe gives its blocks back"
    plain = probe_of(load(model_dir, torch.float32))
    assert plain.gap(probe.logprobs) <= plain.bound("float32")


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_rounding_stays_well_below_the_bound_and_other_weights_far_above(family: str, tmp_path: Path):
    """The same model in float64 and bfloat16, and one whose last matrix is a hundredth off."""
    model_dir = folder_of(family, tmp_path)
    probe = probe_of(load(model_dir, torch.float32))
    assert probe.gap(probe_of(load(model_dir, torch.bfloat16)).logprobs) <= probe.bound("bfloat16") / 2
    other = load(model_dir, torch.float32)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.01)
    assert probe.gap(probe_of(other).logprobs) >= 50 * probe.bound("float32")


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_a_model_in_bfloat16_knows_how_far_rounding_carries_it(family: str, tmp_path: Path):
    """Its outputs are rounded already, and rounding them again would say 0. What else it rounds on the way comes on top."""
    model_dir = folder_of(family, tmp_path)
    single, half = probe_of(load(model_dir, torch.float32)), probe_of(load(model_dir, torch.bfloat16))
    assert single.sensitivity / 3 < half.sensitivity < 5 * single.sensitivity


def test_a_bound_is_that_of_its_dtype():
    probe = Probe((1, 2), (-3.0,), sensitivity=1.0, longest_sum=4096, unit=0.0)
    assert probe.bound("bfloat16") == pytest.approx(4 * 2**-8 * (1 + 3), rel=1e-3)
    assert probe.bound("float32") == pytest.approx(4 * 65**0.5 * 2**-24 * (1 + 3) * (4097 / 65) ** 0.5, rel=1e-3)
    assert probe.refusal([math.nan], "bfloat16")


@pytest.mark.parametrize("logprob", [-1e7, math.nan])
def test_ruined_weights_are_served_as_they_are(logprob: float):
    """A run goes on and says that it learns nothing; its engine must not be taken for the fault."""
    probe = Probe((1, 2), (logprob,), sensitivity=1.0, longest_sum=4096, unit=0.0)
    assert not probe.is_telling and probe.refusal([-3e6], "float32") == ""


async def test_an_engine_that_keeps_an_old_matrix_ends(tmp_path: Path, transport: ShmTransport, monkeypatch: pytest.MonkeyPatch):
    model_dir = folder_of("llama", tmp_path)
    trainer = Trainer(model_dir, TrainerConfig(), transport)
    old = {name: array.copy() for name, array in trainer.published().items()}
    trainer.flat.weights.mul_(1.05)
    snapshot = transport.expose(trainer.published(), version=1, incarnation=0)
    honest = GeneralWeights.load

    def forgetful(self: GeneralWeights, parameters: dict[str, np.ndarray]) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        honest(self, parameters | {name: old[name]})

    engine = EmbeddedEngine(model_dir, transport, CONFIG)
    monkeypatch.setattr(GeneralWeights, "load", forgetful)
    with pytest.raises(EngineError, match="does not compute with the weights of version 1"):
        await engine.update_weights(snapshot, 1)
    with pytest.raises(EngineUnavailable):
        await contract.collect(engine.generate(contract.request("a")))
    assert "does not compute" in engine.stats().failure
    await engine.close()


def test_a_snapshot_in_a_file_keeps_its_probe_and_is_a_model_s_weights_for_anybody_else(tmp_path: Path, transport: ShmTransport):
    model_dir = folder_of("llama", tmp_path / "model")
    trainer = Trainer(model_dir, TrainerConfig(), transport)
    trainer.save_weights(tmp_path / "snapshot.safetensors")
    assert probe_in(read_published(tmp_path / "snapshot.safetensors")) == probe_in(trainer.published())
    assert read_weights(tmp_path / "snapshot.safetensors").keys() == trainer.published().keys() - {PROBE}
