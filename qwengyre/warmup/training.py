"""Supervised learning of the demonstrations. `B` rows, `T` tokens of the longest row of a batch, `V` token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.rows import Row

IGNORED = -100


def new_model(config: WarmupConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.hidden_size // config.num_heads,
            initializer_range=config.initializer_range,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            dtype="float32",
        )
    )


def batches(rows: Sequence[Row], tokens_per_batch: int, rng: np.random.Generator) -> list[list[Row]]:
    """Rows of like length together, at most `tokens_per_batch` tokens with padding, in random order."""
    ordered = sorted(rows, key=lambda row: (len(row), rng.random()))
    groups: list[list[Row]] = [[]]
    for row in ordered:
        if groups[-1] and len(row) * (len(groups[-1]) + 1) > tokens_per_batch:
            groups.append([])
        groups[-1].append(row)
    return [groups[index] for index in rng.permutation(len(groups))]


def fit(
    model: Qwen3ForCausalLM,
    updates: Sequence[Sequence[Row]],
    weight_V: torch.Tensor,
    config: WarmupConfig,
    progress: Callable[[int, int, float], None],
) -> None:
    """One AdamW update per batch of `updates`, in order; `progress(done, total, loss)` after each.

    The loss is the mean over the learned tokens, weighted by token id with `weight_V`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for index, rows in enumerate(updates):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(index / len(updates))
        token_ids_BT, targets_BT = _pad(rows, model.config.pad_token_id)
        logits = model(input_ids=token_ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten(), weight=weight_V, ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(index + 1, len(updates), float(loss.detach()))


@torch.no_grad()
def copy_accuracy(model: Qwen3ForCausalLM, rows: Sequence[Row], is_copied: np.ndarray) -> float:
    """Share of the learned tokens with `is_copied` (by token id) that the model finds most likely."""
    num_right = num_copied = 0
    for row in rows:
        token_ids_T = row.token_ids_T.astype(np.int64)
        copied_T = row.learned_T & is_copied[token_ids_T]
        logits = model(input_ids=torch.from_numpy(token_ids_T[None]), use_cache=False).logits
        likeliest_T = logits[0, :-1].argmax(-1).numpy()
        num_right += int((likeliest_T == token_ids_T[1:])[copied_T[1:]].sum())
        num_copied += int(copied_T.sum())
    return num_right / max(num_copied, 1)


def _schedule(done: float, rise: float = 0.05, floor: float = 0.1) -> float:
    if done < rise:
        return (done + 1e-3) / rise
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise)))


def _pad(rows: Sequence[Row], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and targets; causal attention never lets padding touch a real token."""
    length = max(map(len, rows))
    token_ids_BT = np.full((len(rows), length), pad, np.int64)
    targets_BT = np.full((len(rows), length), IGNORED, np.int64)
    for index, row in enumerate(rows):
        token_ids_BT[index, : len(row)] = row.token_ids_T
        targets_BT[index, : len(row)] = np.where(row.learned_T, row.token_ids_T, IGNORED)
    return torch.from_numpy(token_ids_BT), torch.from_numpy(targets_BT)
