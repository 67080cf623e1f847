"""Qwen3 weights of Hugging Face in the layout that a decode iteration reads fastest.

Every matrix reads (input, output) and lies as Hugging Face has it, transposed: loading is a plain copy, and one `mm` needs
none. Query, key and value projections are one matrix, gate and up another. The weight of each RMS norm but the last is folded
into the matrix that follows it; the head, which may be the embedding, stays as it is. The channels of a query or key head are
interleaved (i, i + D/2), which turns the rotary embedding into one complex product; dot products do not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors.numpy import load_file

from qwengyre.core.errors import ModelRefused
from qwengyre.models.config_file import NEEDED, read_config_file, require
from qwengyre.models.placement import HOST, host_array
from qwengyre.models.weight_files import weight_files
from qwengyre.transfer.api import Pieces

if TYPE_CHECKING:
    from qwengyre.engines.config import EngineConfig
    from qwengyre.engines.passes import LoadedModel

LAYER = "model.layers.{}."
BEFORE = {
    "self_attn.v_proj.weight": "input_layernorm.weight",
    "mlp.gate_proj.weight": "post_attention_layernorm.weight",
    "mlp.up_proj.weight": "post_attention_layernorm.weight",
}
"""The norm that is folded into a matrix."""
Read = Callable[[dict[str, np.ndarray]], object]
"""Fetches parameters into the arrays given."""
ReadPieces = Callable[[dict[str, Pieces]], object]
"""Fetches blocks and states into the memory given."""


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
        text = f"qwen3 float32 interleaved, by layer and chunk, block={block_size} {msgspec.json.encode(self).decode()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self, config: EngineConfig, device: torch.device) -> LoadedModel:
        """Memory on `device` to serve with."""
        from qwengyre.engines.kernels import open_qwen3

        return open_qwen3(self, config, device)


def read_spec(model_dir: Path) -> ModelSpec:
    """Read `config.json`. Raises ModelRefused for anything but a dense Qwen3 with plain rotary embeddings, ConfigError for numbers that
    no model can have."""
    raw = read_config_file(model_dir)
    if reason := _not_plain(raw):
        raise ModelRefused(f"{model_dir / 'config.json'}: {reason}")
    require(raw, model_dir, (*NEEDED, "num_key_value_heads", "intermediate_size", "rms_norm_eps"))
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
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


def is_plain_qwen3(model_dir: Path) -> bool:
    """Whether `read_spec` takes this folder. Raises ConfigError when its config cannot be read."""
    return not _not_plain(read_config_file(model_dir))


def _not_plain(raw: dict[str, Any]) -> str:
    """Why this is not a dense Qwen3 with plain rotary embeddings; "" when it is."""
    if raw.get("model_type") != "qwen3":
        return f"model_type {raw.get('model_type')!r} is not 'qwen3'"
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    special = {
        "attention_bias": raw.get("attention_bias"),
        "use_sliding_window": raw.get("use_sliding_window"),
        "rope type": rope.get("rope_type", "default") != "default",
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "quantization": raw.get("quantization_config"),
    }
    return next((f"a Qwen3 with this {name} is not supported" for name, found in special.items() if found), "")


def read_weights(model_dir: Path) -> dict[str, np.ndarray]:
    """All parameters of `model_dir`, as float32, by their Hugging Face names. Raises ModelRefused."""
    return {name: array.astype(np.float32) for path in weight_files(model_dir) for name, array in load_file(path).items()}


class LayerWeights:
    """One layer. H hidden, D head_dim, I intermediate."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        heads_dim = spec.heads * spec.head_dim
        self.qkv = _matrix(spec.hidden, heads_dim + 2 * spec.kv_heads * spec.head_dim, device)
        self.qk_norm = torch.empty(spec.heads + spec.kv_heads, spec.head_dim, device=device)
        self.out = _matrix(heads_dim, spec.hidden, device)
        self.gate_up = _matrix(spec.hidden, 2 * spec.intermediate, device)
        self.down = _matrix(spec.intermediate, spec.hidden, device)

    def places(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        """Where each matrix goes whose rows keep their order, (output, input)."""
        num_v = spec.kv_heads * spec.head_dim
        return {
            "self_attn.v_proj.weight": self.qkv.T[-num_v:],
            "self_attn.o_proj.weight": self.out.T,
            "mlp.gate_proj.weight": self.gate_up.T[: spec.intermediate],
            "mlp.up_proj.weight": self.gate_up.T[spec.intermediate :],
            "mlp.down_proj.weight": self.down.T,
        }


class EngineWeights:
    """All weights of a model, allocated once and filled in place by `load`."""

    def __init__(self, spec: ModelSpec, device: torch.device = HOST):
        self.spec, self.device = spec, device
        self.embedding = _taken((spec.vocabulary, spec.hidden), device)
        self.norm = torch.empty(spec.hidden, device=device)
        """Of the last layer's output; it is not folded into `head`."""
        self.head = self.embedding.T if spec.tied else _matrix(spec.hidden, spec.vocabulary, device)
        self.layers = [LayerWeights(spec, device) for _ in range(spec.num_layers)]

    def load_folder(self, model_dir: Path) -> None:
        """Copy the weights of a folder in. Raises ModelRefused."""
        self.load(read_weights(model_dir))

    def release(self) -> None:
        """They go with this object."""

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Copy a state dict (Hugging Face names) in. Raises ModelRefused when a name or shape is wrong."""

        def read(into: dict[str, np.ndarray]) -> None:
            for name, array in into.items():
                np.copyto(array, parameters[name])

        self.load_by(read, parameters)

    def load_by(self, read: Read, like: Mapping[str, np.ndarray]) -> None:
        """As `load`, of parameters of the shapes and dtypes of `like`, which `read(into)` fetches layer by layer.

        They land where they stay, if that is on the host and as Hugging Face has them, else in scratch memory of one layer. When
        `read` raises, the weights are half of one version and half of another: throw them away.
        """
        self._check(like)
        with torch.inference_mode():
            outer = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
            if not self.spec.tied:
                outer["lm_head.weight"] = self.head.T
            for name, landed in _land(read, like, outer).items():
                if landed is not outer[name]:
                    outer[name].copy_(landed)
            scratch: dict[str, torch.Tensor] = {}
            for index, layer in enumerate(self.layers):
                self._load_layer(layer, read, like, LAYER.format(index), scratch)

    def _load_layer(
        self, layer: LayerWeights, read: Read, like: Mapping[str, np.ndarray], prefix: str, scratch: dict[str, torch.Tensor]
    ) -> None:
        spec, order = self.spec, interleaved(self.spec.head_dim, self.device)
        places = layer.places(spec)
        targets = {prefix + name: places.get(name) for name in layer_shapes(spec)}
        landed = _land(read, like, targets, scratch, prefix)
        get = {name.removeprefix(prefix): tensor.to(self.device) for name, tensor in landed.items()}
        for name, place in places.items():
            if name in BEFORE:
                torch.mul(get[name], get[BEFORE[name]], out=place)
            elif get[name] is not place:
                place.copy_(get[name])
        norm = get["input_layernorm.weight"]
        num_q, num_k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        rotated = {"self_attn.q_proj.weight": layer.qkv.T[:num_q], "self_attn.k_proj.weight": layer.qkv.T[num_q : num_q + num_k]}
        for name, place in rotated.items():
            pairs = get[name].view(-1, 2, spec.head_dim // 2, spec.hidden).transpose(1, 2)
            torch.mul(pairs, norm, out=place.view(pairs.shape))
        layer.qk_norm[: spec.heads] = get["self_attn.q_norm.weight"][order]
        layer.qk_norm[spec.heads :] = get["self_attn.k_norm.weight"][order]

    def _check(self, parameters: Mapping[str, np.ndarray]) -> None:
        for name, shape in expected_shapes(self.spec).items():
            if name not in parameters:
                raise ModelRefused(f"the snapshot has no parameter {name!r}")
            if tuple(parameters[name].shape) != shape:
                raise ModelRefused(f"parameter {name!r} is {tuple(parameters[name].shape)}, the model needs {shape}")


def _matrix(num_inputs: int, num_outputs: int, device: torch.device) -> torch.Tensor:
    """(input, output), lying in memory by columns."""
    return _taken((num_outputs, num_inputs), device).T


def _taken(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Memory whose content is unknown. The host's by numpy, which asks for huge pages: filling it costs half of what torch's own does."""
    return torch.from_numpy(np.empty(shape, np.float32)) if device == HOST else torch.empty(*shape, device=device)


def _land(
    read: Read,
    like: Mapping[str, np.ndarray],
    targets: Mapping[str, torch.Tensor | None],
    scratch: dict[str, torch.Tensor] | None = None,
    prefix: str = "",
) -> dict[str, torch.Tensor]:
    """Read parameters to their targets; those without one, of another dtype or layout, or on a device, to `scratch` on the host, kept by
    name after `prefix`."""
    scratch = {} if scratch is None else scratch
    landed = {}
    for name, target in targets.items():
        key = name.removeprefix(prefix)
        if target is not None and target.device == HOST and target.is_contiguous() and like[name].dtype == np.float32:
            landed[name] = target
        else:
            if key not in scratch:
                there = HOST if target is None else target.device
                scratch[key] = torch.from_numpy(host_array(like[name].shape, like[name].dtype, there))
            landed[name] = scratch[key]
    read({name: tensor.numpy() for name, tensor in landed.items()})
    return landed


def interleaved(head_dim: int, device: torch.device = HOST) -> torch.Tensor:
    """Channel order that puts the two halves of each rotated pair side by side.

    >>> interleaved(6).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return torch.arange(head_dim, device=device).view(2, head_dim // 2).T.flatten()


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; `lm_head.weight` only when it is not tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocabulary, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    for index in range(spec.num_layers):
        shapes |= {LAYER.format(index) + name: shape for name, shape in layer_shapes(spec).items()}
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer, without its prefix."""
    query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
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
    }


def rope_table(spec: ModelSpec, num_positions: int) -> torch.Tensor:
    """Rotations e^{i p theta_j}, complex64 (num_positions, D / 2), on the host, as Hugging Face computes them in float32."""
    inverse = 1.0 / (
        spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device=HOST).float() / spec.head_dim)
    )
    angle = torch.arange(num_positions, device=HOST).float()[:, None] * inverse
    return torch.complex(angle.cos(), angle.sin())
