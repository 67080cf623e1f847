from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qwengyre.core.errors import ModelRefused
from qwengyre.engines.model import read_weights
from qwengyre.models.weight_files import weight_files


def write(path: Path, **numbers: float) -> None:
    save_file({name: np.full(2, number, np.float32) for name, number in numbers.items()}, path)


def index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_one_file_is_the_model_whatever_else_is_safetensors(tmp_path: Path):
    write(tmp_path / "model.safetensors", a=1, b=2)
    write(tmp_path / "optimizer.safetensors", first=9)
    write(tmp_path / "consolidated.safetensors", a=9)
    assert {name: array[0] for name, array in read_weights(tmp_path).items()} == {"a": 1, "b": 2}


def test_an_index_names_the_files(tmp_path: Path):
    write(tmp_path / "model-00001-of-00002.safetensors", a=1)
    write(tmp_path / "model-00002-of-00002.safetensors", b=2)
    write(tmp_path / "adapter_model.safetensors", c=9)
    index(tmp_path, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    assert {name: array[0] for name, array in read_weights(tmp_path).items()} == {"a": 1, "b": 2}


def test_a_part_that_is_missing_is_named(tmp_path: Path):
    write(tmp_path / "model-00001-of-00002.safetensors", a=1)
    index(tmp_path, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    with pytest.raises(ModelRefused, match="has no model-00002-of-00002"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelRefused, match="is not an index of weights"):
        weight_files(tmp_path)
