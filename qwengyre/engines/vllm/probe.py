"""Does the engine compute with the weights that it was given? A forward in plain torch says what a fixed prompt must give.

An update in place can miss a copy that a kernel keeps (packed for the processor, or a head tied to the embedding); the engine
then answers plausibly under old weights. The probe's log-probs tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional

from qwengyre.engines.model import LAYER, ModelSpec

PROBE_TOKENS = tuple(7 * index * index % 89 + 3 for index in range(32))
"""Arbitrary, below the vocabulary of any model."""


def reference_logprobs(spec: ModelSpec, parameters: Mapping[str, np.ndarray], token_ids: Sequence[int]) -> list[float]:
    """Log-probs (T-1,) of tokens 1.. of `token_ids` under a Qwen3 of Hugging Face parameters, in float32.

    One matrix is held as float32 at a time, so it fits beside a model of any size.
    """

    def get(name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(parameters[name])).float()

    ids = torch.tensor(token_ids)
    with torch.inference_mode():
        x_TH = functional.embedding(ids, get("model.embed_tokens.weight"))
        rope = _rope(spec, len(token_ids))
        for index in range(spec.num_layers):
            prefix = LAYER.format(index)
            x_TH = _layer(spec, lambda name, prefix=prefix: get(prefix + name), x_TH, rope)
        x_TH = _norm(x_TH, get("model.norm.weight"), spec.rms_eps)
        logits_TV = x_TH @ get("model.embed_tokens.weight" if spec.tied else "lm_head.weight").T
        logprobs_TV = logits_TV[:-1].log_softmax(-1)
        return logprobs_TV.gather(1, ids[1:, None]).squeeze(1).tolist()


def _layer(spec: ModelSpec, get, x_TH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    h_TH = _norm(x_TH, get("input_layernorm.weight"), spec.rms_eps)
    query = (h_TH @ get("self_attn.q_proj.weight").T).view(-1, spec.heads, spec.head_dim)
    key = (h_TH @ get("self_attn.k_proj.weight").T).view(-1, spec.kv_heads, spec.head_dim)
    value = (h_TH @ get("self_attn.v_proj.weight").T).view(-1, spec.kv_heads, spec.head_dim)
    query = _rotate(_norm(query, get("self_attn.q_norm.weight"), spec.rms_eps), rope)
    key = _rotate(_norm(key, get("self_attn.k_norm.weight"), spec.rms_eps), rope)
    group = spec.heads // spec.kv_heads
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1).repeat_interleave(group, 0),
        value.transpose(0, 1).repeat_interleave(group, 0),
        is_causal=True,
    )
    x_TH = x_TH + out.transpose(0, 1).flatten(1) @ get("self_attn.o_proj.weight").T
    h_TH = _norm(x_TH, get("post_attention_layernorm.weight"), spec.rms_eps)
    gated = functional.silu(h_TH @ get("mlp.gate_proj.weight").T) * (h_TH @ get("mlp.up_proj.weight").T)
    return x_TH + gated @ get("mlp.down_proj.weight").T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rope(spec: ModelSpec, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 1.0 / (spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim))
    angle = torch.arange(num_positions).float()[:, None] * inverse
    angle = torch.cat([angle, angle], -1)[:, None]
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]
