"""A text must not be longer than the model has positions, nor so long that it turns its tokens otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from qwengyre.core.errors import ConfigError, UnsupportedModel
from qwengyre.models.limits import longest_text
from qwengyre.testing.families import tiny_config, tiny_model, write_family
from qwengyre.testing.training import every_token
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.preflight import check_folder
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import LayoutPath, build_row

LONG_ROPE = {
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20, "partial_rotary_factor": 1.0},
        **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    },
    "original_max_position_embeddings": 20,
    "max_position_embeddings": 80,
}


@pytest.mark.parametrize(
    "family, changes, num_tokens",
    [
        ("llama", {}, None),
        ("phi3", LONG_ROPE, 20),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_position_embeddings": 24},
            24,
        ),
        ("gpt2", {"n_positions": 30}, 30),
        ("opt", {"max_position_embeddings": 30}, 30),
    ],
)
def test_the_limit_of_a_family(family, changes, num_tokens):
    limit = longest_text(tiny_model(family, **changes))
    assert (limit and limit.num_tokens) == num_tokens


def test_a_path_beyond_the_limit_is_refused_by_name():
    model = TreeModel(tiny_model("phi3", **LONG_ROPE), TrainerConfig())
    for length in (20, 21):
        row = build_row([LayoutPath(np.arange(length, dtype=np.int32), (((0, 0, 0), length),))])
        targets, _ = every_token(row)
        if length == 20:
            model.logprobs(row, targets)
        else:
            with pytest.raises(UnsupportedModel, match=r"Phi3ForCausalLM .* path of 21 tokens, of 20: its rotary embeddings"):
                model.logprobs(row, targets)


def test_config_check_finds_a_context_beyond_the_limit(tmp_path):
    write_family(tmp_path, "phi3", **LONG_ROPE)
    (tmp_path / "model.safetensors").unlink()
    check_folder(tmp_path, 20)
    with pytest.raises(ConfigError, match=r"policy\.max_context_tokens: texts of this model end at 20 tokens"):
        check_folder(tmp_path, 21)


@pytest.mark.parametrize("family, reason", [("bloom", "AttentionInterface"), ("minimax", "away from those of its own forward")])
def test_config_check_finds_a_refusal_without_weights(tmp_path, family, reason):
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        check_folder(tmp_path, 64)


def test_config_check_of_a_large_model_reads_no_weights(tmp_path):
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        hidden_size=4096, num_hidden_layers=94, num_experts=128, architectures=["Qwen3MoeForCausalLM"]
    ).save_pretrained(tmp_path)
    check_folder(tmp_path, 4096)
