"""Whether a folder's model can be trained, without its weights: by a tiny random model of the same config."""

from __future__ import annotations

from pathlib import Path

import torch

from qwengyre.core.errors import ConfigError
from qwengyre.models.adapter_record import Adapter
from qwengyre.models.adapters import adapt
from qwengyre.models.limits import longest_text
from qwengyre.models.load import read_config
from qwengyre.models.shrink import small_model
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.tree_model import TreeModel


def check_folder(model_dir: Path, max_context_tokens: int, lora: LoraConfig | None = None) -> None:
    """Raises ConfigError and UnsupportedModel for what the trainer will refuse when it loads this folder.

    A config that cannot be made small is not tried: its model is, at its load.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    limit = longest_text(model)
    if limit and max_context_tokens > limit.num_tokens:
        raise ConfigError(
            f"texts of this model end at {limit.num_tokens} tokens: {limit.reason}. Lower it", key="policy.max_context_tokens"
        )
    if lora is not None and lora.rank:
        adapt(model, Adapter(lora.rank, lora.scales_by), lora.targets)
    if (small := small_model(config)) is not None:
        TreeModel(small, TrainerConfig())
