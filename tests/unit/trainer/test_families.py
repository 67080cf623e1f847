"""Families over trees: exact, or refused by name. One of each mechanism; `make test-models` tries all that transformers lists."""

from __future__ import annotations

import pytest
import torch

from qwengyre.core.errors import UnsupportedModel
from qwengyre.models.interface import NAME
from qwengyre.testing.families import tiny_model
from qwengyre.testing.model_trials import TrialVerdict, try_trainer
from qwengyre.testing.training import tiny_qwen3
from qwengyre.trainer import sinks
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel

EXACT = {
    "dense": ("llama", {}),
    "dropout in training only": ("seed_oss", {"attention_dropout": 0.1}),
    "biased head": ("phi", {}),
    "absolute positions": ("gpt2", {}),
    "windows": ("gemma3_text", {}),
    "chunks": ("llama4_text", {}),
    "logits divided": ("granite", {"logits_scaling": 8.0}),
    "logits multiplied": ("cohere2", {"logit_scale": 0.0625}),
    "hidden states divided": ("minicpm3", {}),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9}),
    "sinks": ("gpt_oss", {}),
    "sinks and unequal widths": ("mimo_v2_flash", {}),
    "latent attention": ("deepseek_v3", {}),
    "latent attention, lite": ("glm4_moe_lite", {}),
    "two attentions in a layer": ("diffllama", {}),
    "mixture": ("qwen3_moe", {}),
    "mixture whose router begins at zero": ("afmoe", {}),
    "mixture with corrections of its routers": ("glm4_moe", {}),
    "mixture with corrections that are parameters": ("ernie4_5_moe", {}),
    "gated delta net": ("qwen3_5_text", {}),
    "gated delta net and mixture": ("qwen3_next", {}),
    "Kimi's delta attention": ("kimi_linear", {}),
    "short convolutions": ("lfm2", {}),
    "Mamba 2 and attention in turn": ("nemotron_h", {}),
    "Mamba 2 beside attention": ("falcon_h1", {}),
    "Mamba": ("mamba", {}),
}
REFUSED = {
    "attention without the interface": ("bloom", "AttentionInterface"),
    "a mask of its own": ("doge", "attention mask"),
    "chosen keys": ("glm_moe_dsa", "indexed_attention"),
    "relative positions": ("inkling_text", "position_bias"),
    "lightning attention": ("minimax", "away from those of its own forward"),
    "gated linear recurrences": ("recurrent_gemma", "away from those of its own forward"),
    "both directions": ("bert-generation", "later tokens"),
}


@pytest.mark.parametrize("mechanism", EXACT)
def test_a_tree_gives_what_every_path_gives_by_itself(mechanism):
    torch.set_num_threads(1)
    family, changes = EXACT[mechanism]
    assert try_trainer(tiny_model(family, **changes)) == TrialVerdict(True)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_tree_cannot_follow_is_refused_by_name_and_reason(kind):
    family, reason = REFUSED[kind]
    model = tiny_model(family)
    attention = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=rf"{type(model).__name__} cannot be trained over trees: .*{reason}"):
        TreeModel(model, TrainerConfig())
    assert model.config._attn_implementation in (attention, NAME)


def test_a_wrong_log_prob_is_found_at_load():
    model = tiny_qwen3()
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: out + 0.1 * out.cumsum(1))
    with pytest.raises(UnsupportedModel, match=r"Qwen3ForCausalLM .* log-probs are up to"):
        TreeModel(model, TrainerConfig())


def test_a_wrong_gradient_is_found_at_load(monkeypatch):
    model = tiny_model("gpt_oss")
    TreeModel(model, TrainerConfig())
    merge = sinks.merge
    monkeypatch.setattr(sinks, "merge", lambda out, lse, sinks_H: merge(out, lse.clone(), sinks_H))
    with pytest.raises(UnsupportedModel, match=r"GptOssForCausalLM .* gradients by earlier tokens are up to"):
        TreeModel(model, TrainerConfig())


def test_the_smallest_weights_hide_nothing():
    """Log-probs of such a model are uniform whatever its layers do."""
    model = tiny_qwen3(initializer_range=1e-4)
    TreeModel(model, TrainerConfig())
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: out + 0.1 * out.cumsum(1))
    with pytest.raises(UnsupportedModel, match="Qwen3ForCausalLM"):
        TreeModel(model, TrainerConfig())


def test_the_trial_leaves_the_model_as_it_was():
    model = tiny_qwen3()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    TreeModel(model, TrainerConfig())
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.requires_grad and parameter.grad is None and torch.equal(parameter, value)
    assert not model.model.embed_tokens._forward_hooks
