"""Supervised learning of the demonstrations. `B` rows, `T` tokens of the longest row of a batch, `V` token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.rows import Row

IGNORED = -100
RISE_UPDATES = 20
"""Updates over which the step size rises."""
FLOOR = 0.1
"""Share of the step size at the end."""
LEARNING_RATES = {"qwen3": 4e-3, "qwen3_moe": 2e-3, "qwen3_5_text": 1.5e-3}
"""AdamW's step size, by family. At 4e-3 a mixture had not learned the operators after 900 updates, at 2e-3 it is ready after 240; a hybrid learns
to copy at 2e-3 but had not learned the operators after 460, at 1.5e-3 it is ready after 380."""
NUM_EXPERTS, NUM_CHOSEN = 4, 2
"""Of a mixture: few, so that each of them sees enough of the demonstrations."""


def new_model(config: WarmupConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Of the family that `config` names, with random weights."""
    torch.manual_seed(seed)
    words = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.get_vocab()["<|endoftext|>"],
    }
    return _MAKERS[config.family](config, {**_sizes(config), **words})


def outline(config: WarmupConfig) -> PreTrainedModel:
    """The modules of the model that `new_model` makes, without weights and, as long as there is no tokenizer, with one word."""
    with torch.device("meta"):
        return _MAKERS[config.family](config, {**_sizes(config), "vocab_size": 1, "eos_token_id": None, "pad_token_id": None})


def _sizes(config: WarmupConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": None,
        "dtype": "float32",
    }


def _dense(config: WarmupConfig, sizes: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes))


def _mixture(config: WarmupConfig, sizes: dict[str, Any]) -> PreTrainedModel:
    """As many weights for a token as the dense one has."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    width = 2 * config.hidden_size // NUM_CHOSEN
    experts = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": width}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts}, decoder_sparse_step=1, norm_topk_prob=True))


def _hybrid(config: WarmupConfig, sizes: dict[str, Any]) -> PreTrainedModel:
    """Every second layer attends: a short convolution and one attention can copy from the context.

    All of a head turns with the position. Qwen3.5 turns a quarter, which is 64 numbers of its heads but would be 8 of these.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = {f"linear_num_{what}_heads": config.num_heads for what in ("key", "value")}
    widths = {f"linear_{what}_head_dim": config.hidden_size // config.num_heads for what in ("key", "value")}
    kinds = ["full_attention" if layer % 2 else "linear_attention" for layer in range(config.num_layers)]
    rope = {**sizes["rope_parameters"], "partial_rotary_factor": 1.0}
    values = {**sizes, **heads, **widths, "rope_parameters": rope}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values, linear_conv_kernel_dim=4, layer_types=kinds))


_MAKERS: dict[str, Callable[[WarmupConfig, dict[str, Any]], PreTrainedModel]] = {
    "qwen3": _dense,
    "qwen3_moe": _mixture,
    "qwen3_5_text": _hybrid,
}


def batches(rows: Sequence[Row], tokens_per_batch: int, rng: np.random.Generator) -> list[list[Row]]:
    """Rows of like length together, at most `tokens_per_batch` tokens with padding, in random order."""
    ordered = sorted(rows, key=lambda row: (len(row), rng.random()))
    groups: list[list[Row]] = [[]]
    for row in ordered:
        if groups[-1] and len(row) * (len(groups[-1]) + 1) > tokens_per_batch:
            groups.append([])
        groups[-1].append(row)
    return [groups[index] for index in rng.permutation(len(groups))]


def batch_stream(rows: Sequence[Row], tokens_per_batch: int, rng: np.random.Generator) -> Iterator[list[Row]]:
    """Batches without end: all rows, batched anew, again and again."""
    while True:
        yield from batches(rows, tokens_per_batch, rng)


def fit(
    model: PreTrainedModel,
    stream: Iterator[Sequence[Row]],
    weight_V: torch.Tensor,
    config: WarmupConfig,
    is_ready: Callable[[int, float], bool],
) -> int:
    """One AdamW update per batch at full step until `is_ready(updates so far, loss)`, then let it settle; return how many.

    The loss is the mean over the learned tokens, weighted by token id with `weight_V`. `max_updates` counts full steps.
    """
    learning_rate = config.learning_rate or LEARNING_RATES[config.family]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    num_full, ready = 0, False
    while not ready and num_full < config.max_updates:
        rise = min(1.0, (num_full + 1) / RISE_UPDATES)
        loss = _update(model, optimizer, next(stream), weight_V, learning_rate * rise)
        num_full += 1
        ready = is_ready(num_full, loss)
    for index in range(config.settle_updates):
        share = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * index / config.settle_updates))
        _update(model, optimizer, next(stream), weight_V, learning_rate * share)
    return num_full + config.settle_updates


def _update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: Sequence[Row], weight_V: torch.Tensor, learning_rate: float
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    assert model.config.pad_token_id is not None
    token_ids_BT, targets_BT = _pad(rows, model.config.pad_token_id)
    logits = model(input_ids=token_ids_BT, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten(), weight=weight_V, ignore_index=IGNORED
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def score_tokens(model: PreTrainedModel, rows: Sequence[Row], is_scored: np.ndarray) -> tuple[float, float]:
    """Over the learned tokens with `is_scored` (by token id): share that the model finds most likely, mean nats to say them."""
    num_right, num_scored, nats = 0, 0, 0.0
    for row in rows:
        token_ids_T = torch.from_numpy(row.token_ids_T.astype(np.int64))
        scored_T = torch.from_numpy(row.learned_T & is_scored[row.token_ids_T])[1:]
        if scored_T.any():
            logits = model(input_ids=token_ids_T[None], use_cache=False).logits[0, :-1][scored_T]
            targets = token_ids_T[1:][scored_T]
            num_right += int((logits.argmax(-1) == targets).sum())
            num_scored += len(targets)
            nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return num_right / max(num_scored, 1), nats / max(num_scored, 1)


def _pad(rows: Sequence[Row], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and targets; causal attention never lets padding touch a real token."""
    length = max(map(len, rows))
    token_ids_BT = np.full((len(rows), length), pad, np.int64)
    targets_BT = np.full((len(rows), length), IGNORED, np.int64)
    for index, row in enumerate(rows):
        token_ids_BT[index, : len(row)] = row.token_ids_T
        targets_BT[index, : len(row)] = np.where(row.learned_T, row.token_ids_T, IGNORED)
    return torch.from_numpy(token_ids_BT), torch.from_numpy(targets_BT)
