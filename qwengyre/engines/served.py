"""Which implementation serves a model: kernels of its own for a plain Qwen3, transformers' forward for any other."""

from __future__ import annotations

from pathlib import Path

from qwengyre.engines.model import is_plain_qwen3, read_spec
from qwengyre.engines.passes import ServableModel


def read_served(model_dir: Path) -> ServableModel:
    """Raises ConfigError for a folder that is not whole, ModelRefused for a model that cannot be served as it computes."""
    if is_plain_qwen3(model_dir):
        return read_spec(model_dir)
    from qwengyre.engines.general.model import GeneralModel

    return GeneralModel.read(model_dir)


def check_folder(model_dir: Path) -> None:
    """Raises what `read_served` will raise, without weights: a tiny random model of the same config is tried."""
    if is_plain_qwen3(model_dir):
        return
    from qwengyre.engines.general.model import GeneralModel
    from qwengyre.engines.general.trial import try_model
    from qwengyre.models.load import read_config
    from qwengyre.models.shrink import small_model

    if (small := small_model(read_config(model_dir))) is not None:
        try_model(GeneralModel(small))
