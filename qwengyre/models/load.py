"""The folder of a Hugging Face model becomes a model in memory, and its weights become those of a folder again.

In memory a model has the names that transformers gives its parameters: experts of a layer in one array, the text model of a
vision-language checkpoint without its prefix. In the folder they are apart, and named as they were published: other programs read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import safe_open

from qwengyre.core.errors import ConfigError, ModelRefused
from qwengyre.models.config_file import read_config_file
from qwengyre.models.follow import sentence
from qwengyre.models.weight_files import refuse_adapter, refuse_pickled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Arrays = dict[str, np.ndarray]


def read_config(model_dir: Path) -> Any:
    """The config of a causal language model with whole weights. Raises ConfigError."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    file = str(Path(model_dir) / "config.json")
    read_config_file(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # every family's config class has checks of its own
        raise ConfigError(f"transformers cannot read it: {sentence(error)}", file=file) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model_type {config.model_type!r} is not a causal language model of transformers", file=file)
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "") if isinstance(quantization, dict) else quantization.quant_method
        raise ConfigError(
            f"its weights are quantized ({method}) and cannot be trained: take the folder of the whole ones", file=file
        )
    return config


def load(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Every parameter from the folder, none made up. Raises ConfigError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = read_config(model_dir)
    try:
        refuse_pickled(Path(model_dir))
        refuse_adapter(Path(model_dir))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, trust_remote_code=False
        )
        model, found = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)  # with the loading info, which its types leave out
    except ModelRefused as error:
        raise ConfigError(str(error), file=str(model_dir)) from error
    except Exception as error:  # of whatever reads the files, and of the model's own code
        raise ConfigError(f"transformers cannot load this model: {sentence(error)}", file=str(model_dir)) from error
    missing = sorted(found["missing_keys"]) + sorted(str(entry) for entry in found["mismatched_keys"])
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(f"its files do not hold all weights of a {type(model).__name__}: {named}", file=str(model_dir))
    return model


def skeleton(model_dir: Path) -> PreTrainedModel:
    """The model of a folder without memory for weights: `as_in_folder` and `left_in_folder` of it are those of the loaded one.

    Raises ConfigError.
    """
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    config = read_config(model_dir)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    conversions = get_model_conversion_mapping(model, None, None)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    for path in _files(model_dir):
        for name in _names(path):
            rename_source_key(name, renamings, converters, model.base_model_prefix, model.state_dict())
    setattr(model, "_weight_conversions", [entry for entry in conversions if entry.was_used()])  # noqa: B010  its types lack it
    return model


def as_in_folder(model: PreTrainedModel, weights: Arrays) -> Arrays:
    """Weights of `model` by the names, and in the pieces, that its folder has, with what else it keeps and does not train."""
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()} | _kept_buffers(model)
    found = _reverted(model, tensors)
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in found.items()}


def left_in_folder(model: PreTrainedModel, model_dir: Path) -> frozenset[str]:
    """Names in the weight files of `model_dir` that are not of `model`: a vision tower, heads that draw several tokens."""
    own = _reverted(model, {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()})
    return frozenset(name for path in _files(model_dir) for name in _names(path)) - own.keys()


def read_left(model_dir: Path, names: frozenset[str]) -> Arrays:
    """Those tensors of the folder; bfloat16, which numpy lacks, as float32."""
    found: Arrays = {}
    for path in _files(model_dir) if names else ():
        with safe_open(path, "pt") as file:
            for name in names.intersection(file.keys()):
                tensor = file.get_tensor(name)
                found[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found


def read_kept(model: PreTrainedModel, model_dir: Path) -> Arrays:
    """What the folder of `model`, which may be a skeleton, keeps of it and does not train: corrections of routers, for instance."""
    everything, trained = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    names = [
        set(_reverted(model, {name: torch.empty(tensor.shape, device="meta") for name, tensor in some.items()}))
        for some in (everything, trained)
    ]
    return read_left(model_dir, frozenset(names[0] - names[1]))


def snapshot_in_folder(model_dir: Path, weights: Arrays) -> Arrays:
    """`weights`, by the names that they have in memory, as the folder `model_dir` of the same model has its own, and what else it holds.

    Raises ConfigError; ModelRefused when the weights are of another model.
    """
    model = skeleton(model_dir)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if {name: array.shape for name, array in weights.items()} != shapes:
        different = sorted(
            name for name in shapes.keys() | weights.keys() if name not in weights or weights[name].shape != shapes.get(name)
        )
        raise ModelRefused(f"these are not weights of the model in {model_dir}: they differ in {', '.join(different[:3])}")
    return as_in_folder(model, weights) | read_kept(model, model_dir) | read_left(model_dir, left_in_folder(model, model_dir))


def as_in_memory(model_dir: Path, dtype: torch.dtype) -> Arrays:
    """The weights of a folder by the names that they have in memory. Raises ConfigError."""
    return {name: parameter.detach().numpy() for name, parameter in load(model_dir, dtype).named_parameters()}


def _kept_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that belong to a checkpoint: corrections of routers, for instance. None of a skeleton."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in parameters}
    return {name: tensor.to("cpu") for name, tensor in kept.items() if not tensor.is_meta}


def _reverted(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return reverted


def _files(model_dir: Path) -> list[Path]:
    return sorted(path for path in Path(model_dir).glob("*.safetensors") if path.name.startswith("model"))


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())
