"""Checkpoints: a folder of weights that any tool opens, the optimizer's state beside it, and one JSON of where the run was.

    FOLDER/step-000004/                        model.safetensors: weights by Hugging Face name, and nothing else that is safetensors
                       config.json, tokenizer ...   copied from the policy's folder, with `dtype` as the weights are
                       adapter_model.safetensors, adapter_config.json   where adapters are trained: PEFT's, in place of model.safetensors
                       checkpoint.json              step, number of updates, what the caller added, and the name of the state
    FOLDER/optimizer/step-000004-5c0ffee5.safetensors   both moments by the same names

The optimizer's state lies apart because tools that open a model read every safetensors file of its folder.

Atomic and durable: the state is written first, under a name of its own. Then the model's folder, which names it, is written beside its
place, flushed to the disk and renamed. A reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from qwengyre.core.errors import TrainerError
from qwengyre.models.adapter_record import ADAPTER, Adapter
from qwengyre.models.probe import PROBE, Probe

FORMAT: Final = 2
WEIGHTS, META, CONFIG = "model.safetensors", "checkpoint.json", "config.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names, in place of `WEIGHTS` where adapters are trained."""
STATES: Final = "optimizer"
"""Folder of the optimizer's states, beside the checkpoints."""
DTYPES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""From safetensors' names to those of a model's config."""
MODEL_FILES: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"})
"""Config, tokenizer, chat template, code: what a model needs beside weights. Weights of whatever format are not among them."""

Arrays = dict[str, np.ndarray]


def write_weights(path: Path, weights: Arrays, probe: Probe | None = None, adapter: Adapter | None = None) -> None:
    """One safetensors file, atomically. Probe and adapter lie in its metadata, where tools that open weights do not meet them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    told = {PROBE: probe, ADAPTER: adapter}
    said = {name: msgspec.json.encode(record).decode() for name, record in told.items() if record is not None}
    save_file(weights, beside, metadata={"format": "pt"} | said)
    _flush(beside)
    beside.replace(path)
    _flush(path.parent)


def read_weights(path: Path) -> Arrays:
    return load_file(path)


def read_published(path: Path) -> Arrays:
    """Weights with their probe, as they were published; adapters with what they are. A file that an older version wrote has no probe."""
    with safe_open(path, "np") as file:
        said = file.metadata() or {}
    records: dict[str, type[Probe] | type[Adapter]] = {PROBE: Probe, ADAPTER: Adapter}
    return load_file(path) | {
        name: msgspec.json.decode(said[name], type=kind).packed() for name, kind in records.items() if name in said
    }


def is_adapter(directory: Path) -> bool:
    """Whether a checkpoint has adapters in place of whole weights."""
    return (directory / ADAPTER_WEIGHTS).is_file()


def copy_model_files(source: Path, into: Path, leave_out: Collection[str] = ()) -> None:
    """Everything of a model's folder but its weights and the names in `leave_out`, file by file and each of them whole."""
    into.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        is_index = file.name.endswith(".index.json")  # of weights in several files, which stay where they are
        if file.is_file() and file.suffix in MODEL_FILES and not is_index and file.name not in (META, *leave_out):
            beside = into / f".{file.name}.{os.getpid()}"
            shutil.copyfile(file, beside)
            beside.replace(into / file.name)


def write_model(directory: Path, files: Path, weights: Path | Arrays, adapter: dict[str, Any] | None = None) -> None:
    """A folder that Hugging Face opens: `weights`, a file to copy or arrays, and what `files` holds beside weights.

    Adapters come with the `adapter` that PEFT's config says.

    All of it or nothing; what was in `directory` is gone then. Raises SafetensorError for a file that does not hold weights.
    """
    beside = _beside(directory)
    try:
        copy_model_files(files, beside)
        if isinstance(weights, Path):
            shutil.copyfile(weights, beside / WEIGHTS)
            _tell_dtype(beside)
        else:
            _put_weights(beside, weights, adapter)
        put_in_place(beside, directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write(
    directory: Path,
    files: Path,
    weights: Arrays,
    moments: dict[str, Arrays],
    meta: dict[str, Any],
    adapter: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint to `directory`, in place of one that is there. `moments` are `first` and `second`.

    With PEFT's config of an `adapter`, the weights are its own, by PEFT's names.
    """
    state = directory.parent / STATES / f"{directory.name}-{secrets.token_hex(4)}.safetensors"
    write_weights(state, {f"{moment}.{name}": array for moment, arrays in moments.items() for name, array in arrays.items()})
    beside = _beside(directory)
    copy_model_files(files, beside)
    _put_weights(beside, weights, adapter)
    (beside / META).write_text(json.dumps({"format": FORMAT, **meta, "optimizer": f"{STATES}/{state.name}"}, indent=1))
    put_in_place(beside, directory)
    _forget_leftovers(directory.parent)


def put_in_place(beside: Path, directory: Path) -> None:
    """Flush the folder `beside` to the disk and let it take the place of `directory`, which may exist."""
    for file in beside.iterdir():
        _flush(file)
    _flush(beside)
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        directory.replace(old)
    beside.replace(directory)
    _flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def read(directory: Path) -> tuple[Arrays, dict[str, Arrays], dict[str, Any]]:
    """Return weights, moments and meta of a checkpoint. Raises TrainerError for a folder that is not one, or is damaged."""
    old = directory.with_name(f".{directory.name}.old")
    if not directory.exists() and old.exists():
        old.replace(directory)
    meta = read_meta(directory)
    if meta.get("format") != FORMAT:
        raise TrainerError(f"{directory}: checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    state = directory.parent / meta["optimizer"]
    weights = ADAPTER_WEIGHTS if is_adapter(directory) else WEIGHTS
    moments: dict[str, Arrays] = {"first": {}, "second": {}}
    try:
        for key, array in load_file(state).items():
            moment, _, name = key.partition(".")
            moments[moment][name] = array
        return load_file(directory / weights), moments, meta
    except (OSError, SafetensorError) as error:
        raise TrainerError(
            f"{directory} cannot be read ({error}): put back {weights} in it and {state}, or remove the checkpoint to go on from the"
            " one before it"
        ) from error


def read_meta(directory: Path) -> dict[str, Any]:
    """The JSON of a checkpoint. Raises TrainerError for a folder that is not one."""
    try:
        meta: dict[str, Any] = json.loads((directory / META).read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"{directory} is not a checkpoint: {error}") from error
    return meta


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `folder` by their step, the oldest first."""
    found = sorted(path for path in folder.glob("step-*") if (path / META).is_file())
    return {int(path.name.removeprefix("step-")): path for path in found}


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return folder / f"step-{step:06d}"


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest, with their optimizer states."""
    for old in list(checkpoints(folder).values())[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    _forget_leftovers(folder)


def _forget_leftovers(folder: Path) -> None:
    """Remove what a kill kept from being finished, and optimizer states that no checkpoint names any more.

    One that a kill left as `.NAME.old` is a checkpoint still: `read` puts it back.
    """
    for unfinished in folder.glob(".*.[0-9]*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    named = {json.loads(meta.read_text()).get("optimizer") for meta in folder.glob(f"*/{META}")}
    for state in (folder / STATES).glob("*"):
        if f"{STATES}/{state.name}" not in named:
            state.unlink(missing_ok=True)


def _beside(directory: Path) -> Path:
    """An empty folder to fill, which `put_in_place` moves to `directory`."""
    beside = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def _put_weights(directory: Path, weights: Arrays, adapter: dict[str, Any] | None) -> None:
    if adapter is None:
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        _tell_dtype(directory)
    else:
        save_file(weights, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (directory / ADAPTER_CONFIG).write_text(json.dumps(adapter, indent=2) + "\n")


def _tell_dtype(directory: Path) -> None:
    """Say in the config what the weights beside it are: others load a model in the dtype that its config names."""
    with safe_open(directory / WEIGHTS, framework="np") as weights:
        names = [DTYPES[weights.get_slice(name).get_dtype()] for name in weights.keys()]  # noqa: SIM118 (not a dict)
    config = directory / CONFIG
    if config.is_file() and names:
        told = json.loads(config.read_text())
        told.pop("torch_dtype", None)  # what older versions of transformers called it
        told["dtype"] = max(set(names), key=names.count)
        config.write_text(json.dumps(told, indent=2) + "\n")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
