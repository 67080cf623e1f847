"""Qwen3 weights of Hugging Face in the layout that a decode iteration reads fastest.

Every matrix lies transposed (input, output), so that one `mm` needs no copy. Query, key and value projections are one
matrix, gate and up another. The weight of each RMS norm is folded into the matrix that follows it. The channels of a query
or key head are interleaved (i, i + D/2), which turns the rotary embedding into one complex product; dot products do not
change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.numpy import load_file

from qwengyre.core.errors import ModelRefused

LAYER = "model.layers.{}."


class ModelSpec(msgspec.Struct, frozen=True):
    """The shape of a Qwen3 model."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rms_eps: float
    rope_theta: float
    tied: bool

    def fingerprint(self, block_size: int) -> str:
        """Equal for two engines exactly when one can read the KV blocks of the other."""
        text = f"qwen3 float32 interleaved block={block_size} {msgspec.json.encode(self).decode()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_spec(model_dir: Path) -> ModelSpec:
    """Read `config.json`. Raises ModelRefused for anything but a dense Qwen3 with plain rotary embeddings."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ModelRefused(f"{path}: not a readable Hugging Face config ({error})") from error
    if raw.get("model_type") != "qwen3":
        raise ModelRefused(f"{path}: model_type {raw.get('model_type')!r}; the embedded engine runs 'qwen3'")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    unsupported = {
        "attention_bias": raw.get("attention_bias"),
        "use_sliding_window": raw.get("use_sliding_window"),
        "rope type": rope.get("rope_type", "default") != "default",
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
    }
    for name, found in unsupported.items():
        if found:
            raise ModelRefused(f"{path}: the embedded engine does not support this {name}")
    return ModelSpec(
        num_layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        intermediate=raw["intermediate_size"],
        vocabulary=raw["vocab_size"],
        rms_eps=raw["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10000.0),
        tied=raw.get("tie_word_embeddings", False),
    )


def read_weights(model_dir: Path) -> dict[str, np.ndarray]:
    """All parameters of the safetensors files of `model_dir`, as float32, by their Hugging Face names."""
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ModelRefused(f"{model_dir} holds no *.safetensors file")
    return {name: array.astype(np.float32) for path in paths for name, array in load_file(path).items()}


class LayerWeights:
    """One layer. H hidden, D head_dim, I intermediate."""

    def __init__(self, spec: ModelSpec):
        heads_dim = spec.heads * spec.head_dim
        self.qkv = torch.empty(spec.hidden, heads_dim + 2 * spec.kv_heads * spec.head_dim)
        self.qk_norm = torch.empty(spec.heads + spec.kv_heads, spec.head_dim)
        self.out = torch.empty(heads_dim, spec.hidden)
        self.gate_up = torch.empty(spec.hidden, 2 * spec.intermediate)
        self.down = torch.empty(spec.intermediate, spec.hidden)


class EngineWeights:
    """All weights of a model, allocated once and filled in place by `load`."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.embedding = torch.empty(spec.vocabulary, spec.hidden)
        self.head = torch.empty(spec.hidden, spec.vocabulary)
        self.layers = [LayerWeights(spec) for _ in range(spec.num_layers)]

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Copy a state dict (Hugging Face names, float32) in. Raises ModelRefused when a name or shape is wrong."""
        self._check(parameters)
        with torch.inference_mode():
            get = {name: torch.from_numpy(np.asarray(array)) for name, array in parameters.items()}
            self.embedding.copy_(get["model.embed_tokens.weight"])
            head = self.embedding if self.spec.tied else get["lm_head.weight"]
            self.head.copy_((head * get["model.norm.weight"]).T)
            for index, layer in enumerate(self.layers):
                prefix = LAYER.format(index)
                self._load_layer(layer, {name[len(prefix) :]: get[name] for name in get if name.startswith(prefix)})

    def _load_layer(self, layer: LayerWeights, get: Mapping[str, torch.Tensor]) -> None:
        spec = self.spec
        order = interleaved(spec.head_dim)
        before_attention, before_mlp = get["input_layernorm.weight"], get["post_attention_layernorm.weight"]
        query = get["self_attn.q_proj.weight"].view(spec.heads, spec.head_dim, -1)[:, order].flatten(0, 1)
        key = get["self_attn.k_proj.weight"].view(spec.kv_heads, spec.head_dim, -1)[:, order].flatten(0, 1)
        layer.qkv.copy_((torch.cat([query, key, get["self_attn.v_proj.weight"]]) * before_attention).T)
        layer.qk_norm[: spec.heads] = get["self_attn.q_norm.weight"][order]
        layer.qk_norm[spec.heads :] = get["self_attn.k_norm.weight"][order]
        layer.out.copy_(get["self_attn.o_proj.weight"].T)
        layer.gate_up.copy_((torch.cat([get["mlp.gate_proj.weight"], get["mlp.up_proj.weight"]]) * before_mlp).T)
        layer.down.copy_(get["mlp.down_proj.weight"].T)

    def _check(self, parameters: Mapping[str, np.ndarray]) -> None:
        for name, shape in expected_shapes(self.spec).items():
            if name not in parameters:
                raise ModelRefused(f"the snapshot has no parameter {name!r}")
            if tuple(parameters[name].shape) != shape:
                raise ModelRefused(f"parameter {name!r} is {tuple(parameters[name].shape)}, the model needs {shape}")


def interleaved(head_dim: int) -> torch.Tensor:
    """Channel order that puts the two halves of each rotated pair side by side.

    >>> interleaved(6).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; `lm_head.weight` only when it is not tied to the embedding."""
    query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocabulary, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    for index in range(spec.num_layers):
        shapes |= {
            LAYER.format(index) + name: shape
            for name, shape in {
                "self_attn.q_proj.weight": (query, spec.hidden),
                "self_attn.k_proj.weight": (key_value, spec.hidden),
                "self_attn.v_proj.weight": (key_value, spec.hidden),
                "self_attn.o_proj.weight": (spec.hidden, query),
                "self_attn.q_norm.weight": (spec.head_dim,),
                "self_attn.k_norm.weight": (spec.head_dim,),
                "mlp.gate_proj.weight": (spec.intermediate, spec.hidden),
                "mlp.up_proj.weight": (spec.intermediate, spec.hidden),
                "mlp.down_proj.weight": (spec.hidden, spec.intermediate),
                "input_layernorm.weight": (spec.hidden,),
                "post_attention_layernorm.weight": (spec.hidden,),
            }.items()
        }
    return shapes


def rope_table(spec: ModelSpec, num_positions: int) -> torch.Tensor:
    """Rotations e^{i p theta_j}, complex64 (num_positions, D / 2), as Hugging Face computes them in float32."""
    inverse = 1.0 / (spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim))
    angle = torch.arange(num_positions).float()[:, None] * inverse
    return torch.complex(angle.cos(), angle.sin())
