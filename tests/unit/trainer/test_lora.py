"""Adapters: gradients are those of whole training by the chain rule, what engines merge is what was trained, nothing else moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qwengyre.core.errors import ConfigError, ModelRefused, TrainerError, UnsupportedModel
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.served import read_served
from qwengyre.models import adapters
from qwengyre.models.adapter_record import ADAPTER, Adapter, Base, adapter_in
from qwengyre.models.adapters import AdaptedLinear, adapt, from_peft, merged, merging
from qwengyre.models.load import load
from qwengyre.models.probe import PROBE, probe_in
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.families import tiny_model, write_family
from qwengyre.testing.training import micro_step, random_execution
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.preflight import check_folder
from qwengyre.trainer.trainer import Trainer

LORA = LoraConfig(rank=4, alpha=12.0)
CONFIG = TrainerConfig(learning_rate=1e-2, clip_low=0.999, clip_high=1e6, lora=LORA)
MAX_GAP = 1e-4


def claim(step: int = 0, number: int = 0):
    executions = [random_execution(np.random.default_rng([number, i]), i, advantage=(-1.0) ** i, vocabulary=60) for i in range(2)]
    return micro_step(f"m{number}", step, *executions)


def trained(folder: Path, config: TrainerConfig = CONFIG, num_steps: int = 1) -> Trainer:
    torch.set_num_threads(1)
    trainer = Trainer(folder, config, None)
    for step in range(num_steps):
        trainer.begin_step(step)
        trainer.compute(claim(step, step))
        assert trainer.apply(2).applied
    return trainer


def whole(folder: Path, published: dict[str, np.ndarray]) -> torch.nn.Module:
    """The folder's model with what was published merged in."""
    model = load(folder, torch.float32)
    with torch.no_grad():
        for name, array in merged(Base(folder).arrays(), published).items():
            model.get_parameter(name).copy_(torch.from_numpy(array))
    return model


def write(folder: Path, family: str) -> Path:
    write_tiny_qwen3(folder) if family == "qwen3" else write_family(folder, family)
    return folder


@pytest.mark.parametrize("chunk_tokens", [8192, 20])
@pytest.mark.parametrize("targets", [(), ("o_proj",), ("layers.1.mlp.down_proj", "v_proj")])
def test_gradients_are_those_of_whole_training_by_the_chain_rule(tmp_path, targets, chunk_tokens):
    """d loss / d(W + s B A) = G gives dB = s G A^T and dA = s B^T G, for every adapter, and there is no other gradient."""
    write_tiny_qwen3(tmp_path)
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    double = {"dtype": "float64", "chunk_tokens": chunk_tokens, "clip_low": 0.999, "clip_high": 1e6}
    trainer = Trainer(tmp_path, TrainerConfig(lora=lora, **double), None)
    draw = torch.Generator().manual_seed(1)
    trainer.flat.weights.normal_(0, 0.1, generator=draw)
    published = {name: array.copy() for name, array in trainer.whole_weights().items()} | {ADAPTER: trainer.adapter.packed()}
    other = Trainer(tmp_path, TrainerConfig(**double), None)
    for name, view in other.flat.views(other.flat.weights).items():
        stem = name.removesuffix(".weight")
        if stem + ".lora_A" in published:
            view.add_(
                torch.from_numpy(published[stem + ".lora_B"] @ published[stem + ".lora_A"]), alpha=lora.scales_by / lora.rank
            )
    for one in (trainer, other):
        one.begin_step(0)
        one.compute(claim())
    own, full = (one.flat.views(one.flat_gradient()) for one in (trainer, other))
    assert own and all(name.endswith((".lora_A", ".lora_B")) for name in own)
    assert {name.removesuffix(".lora_A").rpartition(".")[2] for name in own if name.endswith("A")} == (
        {target.rpartition(".")[2] for target in targets}
        or {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    )
    for name in own:
        stem, scale = name.rpartition(".")[0], lora.scales_by / lora.rank
        whole_gradient = full[stem + ".weight"].numpy()
        expected = (
            scale * published[stem + ".lora_B"].T @ whole_gradient
            if name.endswith("A")
            else scale * whole_gradient @ published[stem + ".lora_A"].T
        )
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(own[name].numpy(), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert all(p.grad is None for p in trainer.tree_model.model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "qwen3_5_text", "deepseek_v3", "falcon_h1"])
def test_an_engine_computes_with_the_merged_weights_what_was_trained(tmp_path, family):
    """From its probe, from running on under them, and after it had given its memory back; the base stays bit for bit."""
    trainer = trained(write(tmp_path, family), num_steps=2)
    published = trainer.published()
    assert {name for name in published if not name.endswith((".lora_A", ".lora_B"))} == {PROBE, ADAPTER}
    assert any(array.any() for name, array in published.items() if name.endswith(".lora_B"))
    base = Base(tmp_path).arrays()
    for name, parameter in trainer.tree_model.model.named_parameters():
        assert parameter.requires_grad or np.array_equal(parameter.detach().numpy(), base[name])
    spec, probe = read_served(tmp_path), probe_in(published)
    core = EngineCore(spec, EngineConfig(max_context_tokens=64, kv_blocks=16), version=0)
    core.load_folder(tmp_path)
    before = core.logprobs(probe.token_ids)
    core.load_weights_by(merging(base, published), base, version=1)
    core.prove(probe)
    found = np.array(core.logprobs(probe.token_ids))
    assert np.abs(found - np.array(probe.logprobs)).max() <= MAX_GAP < np.abs(found - np.array(before)).max()
    core.weights.release()
    again = EngineCore(spec, core.config, version=1)
    again.fill_weights(merging(base, published), base)
    assert again.logprobs(probe.token_ids) == found.tolist()


def test_a_checkpoint_is_gone_on_from_bit_for_bit_and_nothing_of_the_base_is_in_it(tmp_path):
    write_family(tmp_path / "policy", "llama")
    trainer = trained(tmp_path / "policy")
    trainer.save_checkpoint(tmp_path / "c" / "step-000001", 1, tmp_path / "policy")
    held = from_peft(load_file(tmp_path / "c" / "step-000001" / "adapter_model.safetensors"))
    assert held.keys() == trainer.flat.spans.keys()
    assert not (tmp_path / "c" / "step-000001" / "model.safetensors").exists()
    resumed = Trainer(tmp_path / "policy", CONFIG, None)
    assert resumed.load_checkpoint(tmp_path / "c" / "step-000001")["step"] == 1
    for one in (trainer, resumed):
        one.begin_step(1)
        one.compute(claim(1, 1))
        one.apply(2)
    assert torch.equal(resumed.flat.weights, trainer.flat.weights)
    for config, reason in (
        (TrainerConfig(), "set trainer.lora as it was"),
        (TrainerConfig(lora=LoraConfig(rank=8)), "no adapters of the rank"),
    ):
        with pytest.raises(TrainerError, match=reason):
            Trainer(tmp_path / "policy", config, None).load_checkpoint(tmp_path / "c" / "step-000001")
    with pytest.raises(ConfigError, match=r"has adapters and not the model.*export-model"):
        load(tmp_path / "c" / "step-000001", torch.float32)


def test_a_target_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    write_family(tmp_path, "llama")
    lora = LoraConfig(rank=2, targets=("q_proj", "query"))
    for load_it in (lambda: check_folder(tmp_path, 100, lora), lambda: Trainer(tmp_path, TrainerConfig(lora=lora), None)):
        with pytest.raises(ConfigError, match=r"trainer\.lora\.targets.*'query'.*down_proj, gate_proj, k_proj"):
            load_it()
    check_folder(tmp_path, 100, LoraConfig(rank=2, targets=("q_proj",)))


def test_one_layer_of_many_can_be_named(tmp_path):
    """The tiny model that the family is tried by has fewer."""
    write_family(tmp_path, "llama", num_hidden_layers=5)
    trainer = Trainer(tmp_path, TrainerConfig(lora=LoraConfig(rank=2, targets=("layers.4.self_attn.q_proj",))), None)
    assert list(trainer.flat.spans) == [f"model.layers.4.self_attn.q_proj.lora_{one}" for one in "AB"]


def test_a_layer_that_passes_over_its_adapter_is_refused_at_load(monkeypatch):
    """As one does that reads its weight by itself."""
    model = tiny_model("llama")
    adapt(model, Adapter(2, 4.0))
    monkeypatch.setattr(AdaptedLinear, "forward", torch.nn.Linear.forward)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*down_proj.*away from those of the merged weights"):
        adapt(tiny_model("llama"), Adapter(2, 4.0))


def test_adapters_of_another_model_are_refused(tmp_path):
    write_tiny_qwen3(tmp_path)
    base = Base(tmp_path).arrays()
    name = "model.layers.0.mlp.up_proj"
    published = {f"{name}.lora_A": np.zeros((2, 7), np.float32), ADAPTER: Adapter(2, 4.0).packed()}
    with pytest.raises(ModelRefused, match="fits no weight"):
        merging(base, published)
    assert adapter_in(published).scale == 2.0 and adapters.adapter_in({}) is None


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"rank": -1}, "rank must not be negative"),
        ({"alpha": 3.0}, "rank is 0"),
        ({"targets": ("q_proj",)}, "rank is 0"),
        ({"rank": 4, "alpha": 0.0}, "alpha must be a positive number"),
    ],
)
def test_settings_that_mean_nothing_are_refused(table, reason):
    with pytest.raises(ValueError, match=reason):
        LoraConfig(**table)


@pytest.mark.parametrize("other", [{"ranks": 2}, {"dtype": "bfloat16"}])
def test_what_is_not_built_with_adapters_is_refused_by_name(other):
    with pytest.raises(ValueError, match=r"lora: adapters .* are not built"):
        TrainerConfig(lora=LoraConfig(rank=2), **other)
