"""Tiny random models of every family that transformers lists as a causal language model.

A family is a `model_type`. Its config is the default one of its class, made small by `models.shrink`; where the default lacks a size or
sizes that belong together do not shrink alike, `CHANGES` says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qwengyre.models.follow import sentence
from qwengyre.models.load import as_in_memory, load
from qwengyre.models.probe import PROBE
from qwengyre.models.rounding import probe_of
from qwengyre.models.shrink import HEAD_WIDTH, HIDDEN, shrink

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_PARAMETERS = 4_000_000
"""More, and the config was not made small."""

MOE = {"moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": MOE,
    "dots1": MOE | {"n_shared_experts": 1},
    "ministral": {"head_dim": HEAD_WIDTH},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_oss": {"head_dim": HEAD_WIDTH},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
}
"""By family."""


class NotBuilt(Exception):
    """A family of which no tiny model can be made here, and why."""


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **changes: Any) -> Any:
    """Raises NotBuilt."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return shrink(CONFIG_MAPPING[family](), CHANGES.get(family, {}) | changes)
    except Exception as error:  # every family's config class has checks of its own
        raise NotBuilt(f"its default config cannot be made small: {sentence(error)}") from error


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Seeded, fp32, in eval mode; `changes` go into its config. Raises NotBuilt."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"its tiny model has {size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except NotBuilt:
        raise
    except Exception as error:  # of a config that was shrunk otherwise than the family needs
        raise NotBuilt(f"its tiny model cannot be made: {sentence(error)}") from error
    return lively(model)


@torch.no_grad()
def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Weights of a size at which every part counts: matrices at 0.15, vectors moved by a tenth; the same for the same model.

    What begins at zero is drawn: several families begin their routers so, and the corrections of routers that a folder keeps untrained.
    Taps of convolutions stay: at 0.15 a gated delta net's own forward in float32 is 3e-5 away from that in float64, more than tests allow.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        is_matrix, is_zero = tensor.ndim >= 2, not tensor.any()
        if is_zero or (name in parameters and not is_matrix):
            tensor.add_((0.15 if is_matrix else 0.1) * torch.randn_like(tensor))
        elif name in parameters and "conv" not in name and tensor.std() < 0.1:
            tensor.mul_(0.15 / tensor.std())
    return model


def write_family(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    """Save a tiny model as a Hugging Face folder without a tokenizer, in the names and pieces that its published folders have."""
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return model


def moved_parameters(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """The parameters of a folder's model, by their names in memory, each moved a little at random."""
    rng = np.random.default_rng(seed)
    found = as_in_memory(folder, torch.float32)
    return {name: array + rng.normal(0, 0.05, array.shape).astype(np.float32) for name, array in found.items()}


def published(folder: Path, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """These weights of a folder's model as a trainer publishes them: with the probe."""
    model = load(folder, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(parameters[name]))
    return parameters | {PROBE: probe_of(model).packed()}


def write_vision_language(folder: Path) -> PreTrainedModel:
    """A tiny Qwen3.5 with its vision tower: the text model is what a policy is."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = tiny_config("qwen3_5_text")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": HIDDEN, "patch_size": 4}
    torch.manual_seed(0)
    vision["num_position_embeddings"] = 16
    config = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, image_token_id=60, video_token_id=61)
    model = lively(Qwen3_5ForConditionalGeneration(config))
    model.eval()
    model.save_pretrained(folder)
    return model
