"""Which files of a model's folder are its weights. Imports no torch: a controller looks before any engine is started."""

from __future__ import annotations

from pathlib import Path

import msgspec

from qwengyre.core.errors import ModelRefused


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    """The file of each parameter."""


def weight_files(model_dir: Path) -> list[Path]:
    """The files that hold a model's weights: those of its index, else `model.safetensors`, as Transformers chooses them.

    Other safetensors files, such as adapters or the same weights in another layout, are left alone. Raises ModelRefused.
    """
    index, names = model_dir / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
        except msgspec.MsgspecError as error:
            raise ModelRefused(f"{index} is not an index of weights: {error}") from error
    refuse_pickled(model_dir)
    refuse_adapter(model_dir)
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise ModelRefused(f"{model_dir} has no {', '.join(missing[:3])}: its weights must be there as safetensors, all of them")
    return [model_dir / name for name in names]


def refuse_adapter(model_dir: Path) -> None:
    """Raises ModelRefused for adapters without the model that they are to."""
    if (model_dir / "adapter_config.json").is_file() and not any(model_dir.glob("model*.safetensors")):
        raise ModelRefused(
            f"{model_dir} has adapters and not the model that they are to. Merge them: `qwengyre export-model RUN --out DIR` does for those"
            " of a run, PEFT's merge_and_unload for any"
        )


def refuse_pickled(model_dir: Path) -> None:
    """Raises ModelRefused for a folder that has weights, but only pickled ones."""
    if any(model_dir.glob("*.safetensors")):
        return
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        for path in sorted(model_dir.glob(pattern)):
            raise ModelRefused(
                f"{model_dir} has its weights pickled ({path.name}): reading a pickle may run code in it. Convert them to safetensors"
            )
