"""A folder becomes a model, and a checkpoint a folder again that other programs open: names, pieces, and what is not trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

from qwengyre.core.errors import ConfigError
from qwengyre.models.load import as_in_folder, left_in_folder, load, read_config, read_kept, skeleton
from qwengyre.testing.families import write_family, write_vision_language
from qwengyre.testing.training import micro_step, random_execution
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmTransport


@pytest.fixture
def transport(tmp_path: Path):
    made = ShmTransport(f"qg-test-{tmp_path.name}")
    yield made
    made.close()


def trained(folder: Path, transport: ShmTransport) -> Trainer:
    """One step from the weights of `folder`."""
    torch.set_num_threads(1)
    trainer = Trainer(folder, TrainerConfig(learning_rate=1e-2, clip_low=0.9, clip_high=9.0), transport)
    trainer.begin_step(0)
    trainer.compute(micro_step("m", 0, random_execution(np.random.default_rng(0), 0, advantage=1.0, vocabulary=60)))
    assert trainer.apply(1).applied
    return trainer


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "lfm2", "nemotron_h"])
def test_a_checkpoint_has_the_names_and_pieces_of_the_folder_that_it_began_with(family, tmp_path, transport):
    model = write_family(tmp_path / "policy", family)
    trainer = trained(tmp_path / "policy", transport)
    trainer.save_checkpoint(tmp_path / "checkpoint", 1, tmp_path / "policy")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("policy", "checkpoint"))
    assert {name: array.shape for name, array in after.items()} == {name: array.shape for name, array in before.items()}
    reread, found = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and type(reread) is type(model)
    for name, parameter in reread.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), trainer.whole_weights()[name])
    resumed = Trainer(tmp_path / "policy", trainer.config, transport)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(resumed.flat.weights, trainer.flat.weights)
    assert torch.equal(resumed.optimizer.second_N, trainer.optimizer.second_N)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "lfm2", "vision_language"])
def test_a_skeleton_knows_the_names_and_pieces_of_its_folder_without_its_weights(family, tmp_path):
    """A worker of vLLM turns snapshots into what its loaders know by it."""
    write_vision_language(tmp_path) if family == "vision_language" else write_family(tmp_path, family)
    whole, bare = load(tmp_path, torch.float32), skeleton(tmp_path)
    assert all(tensor.is_meta for tensor in bare.parameters())
    weights = {name: parameter.detach().numpy() for name, parameter in whole.named_parameters()}
    expected, found = as_in_folder(whole, weights), as_in_folder(bare, weights) | read_kept(bare, tmp_path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert left_in_folder(bare, tmp_path) == left_in_folder(whole, tmp_path)


def test_a_vision_language_folder_is_trained_by_its_text_model_and_stays_one(tmp_path, transport):
    before = write_vision_language(tmp_path / "policy")
    trainer = trained(tmp_path / "policy", transport)
    assert not [name for name in trainer.whole_weights() if "visual" in name]
    trainer.save_checkpoint(tmp_path / "checkpoint", 1, tmp_path / "policy")
    after, found = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "checkpoint", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    changed = {name for name, parameter in after.named_parameters() if not torch.equal(parameter, before.get_parameter(name))}
    assert any("language_model" in name for name in changed)
    assert not any("visual" in name for name in changed)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")(ids).logits)


def test_corrections_of_a_router_are_kept(tmp_path, transport):
    write_family(tmp_path / "policy", "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = load_file(tmp_path / "policy" / "model.safetensors")
    save_file(
        weights | {name: np.array([3.0, 0.5, 0, 1], np.float32)}, tmp_path / "policy" / "model.safetensors", {"format": "pt"}
    )
    trained(tmp_path / "policy", transport).save_checkpoint(tmp_path / "checkpoint", 1, tmp_path / "policy")
    np.testing.assert_array_equal(load_file(tmp_path / "checkpoint" / "model.safetensors")[name], [3.0, 0.5, 0, 1])


def test_a_folder_that_lacks_a_weight_is_refused_by_its_name(tmp_path):
    write_family(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"not hold all weights of a LlamaForCausalLM: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"model_type": "t5"}, "not a causal language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\)"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_before_any_weight_is_read(tmp_path, changes, reason):
    write_family(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=reason) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path):
    write_family(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
        load(tmp_path, torch.float32)
