"""A model small enough to try at once, of the same family as a config, with everything that the config switches on.

Widths, counts and the vocabulary shrink; of every kind of layer a few stay; lengths from which on something happens (windows,
chunks, the context of a rotary embedding that is rescaled) become a few tokens, so that it happens on a short text, too. What is
neither size nor length stays as it is: scales, caps, sinks, norms, kinds of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS, HEAD_WIDTH, VOCABULARY, WINDOW = 4, 8, 64, 4
HIDDEN = HEADS * HEAD_WIDTH

SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "ngram_vocab_size_base"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "dff", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48
    ),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp", "block_ff_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size_moe", "moe_latent_size", "router_hidden_size"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(
        ("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "d_kv", "linear_head_dim"),
        HEAD_WIDTH,
    ),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), HEAD_WIDTH
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "d_rel"), HEAD_WIDTH),
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim"), 12),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hidden_size_per_layer_input", "hc_lowrank", "dim_model_base"), 16
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "mamba_ngroups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "o_groups", "zero_expert_num"), 1),
    **dict.fromkeys(("linear_num_key_heads", "rotary_dim", "mamba_dt_rank", "time_step_rank"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 6),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **{
        "lru_width": HIDDEN,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_WIDTH,
        "qk_head_dim": 2 * HEAD_WIDTH,
    },
    **{"num_expert_group": 1, "laurel_rank": 8},
}
"""By key of a config."""

LENGTHS: dict[str, int] = {
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size"), WINDOW
    ),
    **dict.fromkeys(("index_topk", "index_topk_blocks", "index_block_size", "rel_extent"), 2),
}
"""From which on a token no longer sees everything."""

POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "seq_length")
NUM_POSITIONS = 512
MOST_KINDS = 6
"""A list with more different entries numbers the layers and does not name kinds."""


def shrink(config: Any, changes: dict[str, Any] | None = None) -> Any:
    """A tiny config of the class of `config` (its text model's), with `changes`. Raises what that class raises for what it does not take."""
    text = config.get_text_config()
    given = text.to_dict()
    small = {key: _smaller(key, value) for key, value in given.items()}
    _keep_layers(given, small)
    _keep_relations(given, small)
    return type(text).from_dict(small | (changes or {}))


def small_model(config: Any) -> PreTrainedModel | None:
    """A tiny random model of the family of `config`; None when sizes belong together in a way that is not known here."""
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shrink(config)).float().eval()
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="cpu"), use_cache=False)
    except Exception:  # whatever the family's own code makes of sizes that do not fit
        return None
    return model


def _smaller(key: str, value: Any) -> Any:
    if key == "head_dim" and value is None:
        return HEAD_WIDTH
    if value is None or isinstance(value, bool | str):
        return value
    if key in POSITIONS:
        return NUM_POSITIONS
    if key.endswith("_token_id"):
        return min(value, VOCABULARY - 1) if isinstance(value, int) else None
    size = SIZES.get(key, LENGTHS.get(key))
    return size if size is not None and isinstance(value, int) and value > 0 else value


def _keep_layers(given: dict[str, Any], small: dict[str, Any]) -> None:
    """Of every kind of layer the first, two in all at least, in their order."""
    name = next((key for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if given.get(key)), None)
    if name is None:
        return
    num, shared = given[name], given.get("num_kv_shared_layers") or 0
    per_layer = {key: value for key, value in given.items() if isinstance(value, list | tuple) and len(value) == num}
    of_some = given.get("per_layer_config") or {}
    telling = [value for value in per_layer.values() if len({str(entry) for entry in value}) <= MOST_KINDS]
    kinds = [
        (layer >= num - shared, str(of_some.get(str(layer))), *(str(value[layer]) for value in telling)) for layer in range(num)
    ]
    kept = sorted({kinds.index(kind) for kind in kinds} | {min(1, num - 1)})
    small |= {name: len(kept)} | {key: [value[layer] for layer in kept] for key, value in per_layer.items()}
    if shared:
        small["num_kv_shared_layers"] = sum(layer >= num - shared for layer in kept)
    if of_some:
        own = {str(place): of_some[str(layer)] for place, layer in enumerate(kept) if str(layer) in of_some}
        small["per_layer_config"] = {
            place: {key: _smaller(key, value) for key, value in changes.items()} for place, changes in own.items()
        }
    small |= {key: min(2, given[key]) for key in ("decoder_layers", "encoder_layers") if key in given}


def _keep_relations(given: dict[str, Any], small: dict[str, Any]) -> None:
    heads = given.get("num_attention_heads")
    for key in (
        "num_key_value_heads",
        "swa_num_key_value_heads",
        "num_global_key_value_heads",
        "num_kv_heads",
        "multi_query_group_num",
    ):
        if heads and isinstance(given.get(key, 0 if key == "num_key_value_heads" else None), int | None) and key in given:
            number = given[key]
            small[key] = HEADS if number in (None, heads) else 1 if number == 1 else HEADS // 2
    inner = int((given.get("mamba_expand") or given.get("expand") or 2) * HIDDEN)
    for key in ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", *(["num_heads"] if "state_size" in given else [])):
        if isinstance(given.get(key), int):
            small[key] = inner // HEAD_WIDTH
    if isinstance(given.get("mamba_d_ssm"), int):
        small["mamba_d_ssm"] = inner
