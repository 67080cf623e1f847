"""Whether a folder's model can be trained, without its weights: by a tiny random model of the same config."""

from __future__ import annotations

from pathlib import Path

import torch

from qwengyre.core.errors import ConfigError
from qwengyre.models.limits import longest_text
from qwengyre.models.load import read_config
from qwengyre.models.shrink import small_model
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel


def check_folder(model_dir: Path, max_context_tokens: int) -> None:
    """Raises ConfigError and UnsupportedModel for what the trainer will refuse when it loads this folder.

    A config that cannot be made small is not tried: its model is, at its load.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(model_dir)
    with torch.device("meta"):
        limit = longest_text(AutoModelForCausalLM.from_config(config))
    if limit and max_context_tokens > limit.num_tokens:
        raise ConfigError(
            f"texts of this model end at {limit.num_tokens} tokens: {limit.reason}. Lower it", key="policy.max_context_tokens"
        )
    if (small := small_model(config)) is not None:
        TreeModel(small, TrainerConfig())
