"""Numbers of a model's config.json that no model can have, and weights that could run code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qwengyre.core.errors import ConfigError, ModelRefused
from qwengyre.engines.model import read_spec
from qwengyre.models.config_file import read_config_file
from qwengyre.models.load import load, read_config
from qwengyre.models.weight_files import weight_files
from qwengyre.testing.engines import write_tiny_qwen3


def changed(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("vocab_size", value) for value in (-1, 0, "x", 1.5, True, [], {}, 10**30)),
        *(("rms_norm_eps", value) for value in ("x", -1e-6, 0, True, [])),
        *(("rope_theta", value) for value in ("x", -1, 0)),
        *(("num_attention_heads", value) for value in (0, -2, "2")),
        *(("num_key_value_heads", value) for value in (0, 3)),
        *(("num_hidden_layers", value) for value in (-1, "1")),
        *(("hidden_size", value) for value in (0, "8")),
        *(("head_dim", value) for value in (-1, "x")),
        *(("rope_parameters", value) for value in ("x", 3, {"rope_theta": "x"})),
    ],
)
def test_a_number_that_no_model_can_have_is_named(tmp_path: Path, key: str, value: object):
    folder = changed(write_tiny_qwen3(tmp_path), **{key: value})
    for read in (read_spec, read_config_file, read_config):
        with pytest.raises(ConfigError, match=key) as raised:
            read(folder)
        assert raised.value.file == str(folder / "config.json")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps"])
def test_what_a_model_cannot_be_built_without_is_missed(tmp_path: Path, key: str):
    folder = write_tiny_qwen3(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        read_spec(folder)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, "\xff"])
def test_what_is_no_config_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    for read in (read_spec, read_config):
        with pytest.raises(ConfigError, match=r"config\.json"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickled_weights_are_refused_by_name_and_nobody_is_asked(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    folder = write_tiny_qwen3(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"a pickle")
    with pytest.raises(ModelRefused, match=f"pickled \\({name}\\)"):
        weight_files(folder)
    with pytest.raises(ConfigError, match=f"pickled \\({name}\\)"):
        load(folder, torch.float32)


def test_code_that_comes_with_a_model_is_refused_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    folder = changed(write_tiny_qwen3(tmp_path), model_type="own", auto_map=own)
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="cannot read it"):
        read_config(folder)


def test_good_numbers_pass(tmp_path: Path):
    read_spec(write_tiny_qwen3(tmp_path, rope_scaling=None, rms_norm_eps=1e-6))
    assert read_config_file(tmp_path)["model_type"] == "qwen3"
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
