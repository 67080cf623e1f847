"""Checkpoints: a folder that Hugging Face opens, plus the optimizer and one JSON of where the run was. Atomic and durable.

    DIR/config.json, tokenizer ...   copied from the model the run started from
    DIR/model.safetensors            weights by Hugging Face name
    DIR/optimizer.safetensors        both moments by the same names
    DIR/checkpoint.json              step, number of updates, what the caller added (the journal position)

A reader sees the whole folder or none: it is written beside its place, flushed to the disk and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from qwengyre.core.errors import TrainerError

FORMAT = 1
WEIGHTS, OPTIMIZER, META = "model.safetensors", "optimizer.safetensors", "checkpoint.json"

Arrays = dict[str, np.ndarray]


def write_weights(path: Path, weights: Arrays) -> None:
    """One safetensors file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(weights, beside, metadata={"format": "pt"})
    _flush(beside)
    beside.replace(path)
    _flush(path.parent)


def read_weights(path: Path) -> Arrays:
    return load_file(path)


def write(directory: Path, model_dir: Path, weights: Arrays, moments: dict[str, Arrays], meta: dict) -> None:
    """Write a checkpoint to `directory`, in place of one that is there. `moments` are `first` and `second`."""
    beside = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for file in sorted(model_dir.iterdir()):
        if file.is_file() and ".safetensors" not in file.name and file.name != META:
            shutil.copyfile(file, beside / file.name)
    save_file(weights, beside / WEIGHTS, metadata={"format": "pt"})
    flat = {f"{moment}.{name}": array for moment, arrays in moments.items() for name, array in arrays.items()}
    save_file(flat, beside / OPTIMIZER)
    (beside / META).write_text(json.dumps({"format": FORMAT, **meta}, indent=1))
    for file in beside.iterdir():
        _flush(file)
    _flush(beside)
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        directory.replace(old)
    beside.replace(directory)
    _flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def read(directory: Path) -> tuple[Arrays, dict[str, Arrays], dict]:
    """Return weights, moments and meta of a checkpoint. Raises TrainerError for a folder that is none."""
    old = directory.with_name(f".{directory.name}.old")
    if not directory.exists() and old.exists():
        old.replace(directory)
    try:
        meta = json.loads((directory / META).read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"{directory} is no checkpoint: {error}") from error
    if meta.get("format") != FORMAT:
        raise TrainerError(f"{directory}: checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    moments: dict[str, Arrays] = {"first": {}, "second": {}}
    for key, array in load_file(directory / OPTIMIZER).items():
        moment, _, name = key.partition(".")
        moments[moment][name] = array
    return load_file(directory / WEIGHTS), moments, meta


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
