"""Trees and models that the training benches run, and what their arithmetic ought to cost.

`P` paths. Costs are FLOPs of forward and backward: 6 per weight and token, 14 x heads x head size per attention pair and
layer (4 forward, 10 backward with scores recomputed, FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from qwengyre.trajectory.layout import LayoutPath, SegmentKey, TreeRow

if TYPE_CHECKING:
    from transformers import Qwen3Config

VOCABULARY = 2048


class Case(msgspec.Struct, frozen=True):
    name: str
    paths: tuple[LayoutPath, ...]


class _Builder:
    """Paths out of nodes with random tokens."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.nodes: list[np.ndarray] = []

    def node(self, num_tokens: int) -> int:
        self.nodes.append(self.rng.integers(0, VOCABULARY, num_tokens).astype(np.int32))
        return len(self.nodes) - 1

    def path(self, *uses: tuple[int, int | None]) -> LayoutPath:
        """`uses`: (node, leading tokens of it; None for all)."""
        pieces = [self.nodes[node][:length] for node, length in uses]
        segments: list[tuple[SegmentKey, int]] = [((0, node, 0), len(p)) for (node, _), p in zip(uses, pieces, strict=True)]
        return LayoutPath(np.concatenate(pieces), tuple(segments))


def sharing_most(num_paths: int, num_tokens: int, seed: int = 0) -> Case:
    """`num_paths` paths of `num_tokens` that share their first three quarters, as compactions and retries of one context do."""
    build = _Builder(seed)
    trunk = build.node(num_tokens * 3 // 4)
    paths = tuple(build.path((trunk, None), (build.node(num_tokens // 4), None)) for _ in range(num_paths))
    return Case(f"{num_paths} paths of {num_tokens // 1024}k sharing most", paths)


def shared_prompt(num_executions: int, prompt_tokens: int, own_tokens: int, seed: int = 0) -> Case:
    build = _Builder(seed)
    prompt = build.node(prompt_tokens)
    paths = tuple(build.path((prompt, None), (build.node(own_tokens), None)) for _ in range(num_executions))
    return Case(f"{num_executions} x ({prompt_tokens // 1024}k shared + {own_tokens // 1024}k own)", paths)


def side_branches(trunk_tokens: int, num_branches: int, branch_tokens: int, seed: int = 0) -> Case:
    """A trunk with short branches at random places of it."""
    build = _Builder(seed)
    trunk = build.node(trunk_tokens)
    cuts = np.sort(build.rng.integers(1, trunk_tokens, num_branches)).tolist()
    sides = [build.path((trunk, cut), (build.node(branch_tokens), None)) for cut in cuts]
    return Case(
        f"{trunk_tokens // 1024}k trunk + {num_branches} branches of {branch_tokens}", (build.path((trunk, None)), *sides)
    )


class ModelCost(msgspec.Struct, frozen=True):
    """FLOPs per token and per attention pair of one model."""

    per_token: float
    per_pair: float

    @staticmethod
    def of(config: Qwen3Config) -> ModelCost:
        """The embedding look-up is free, the head is not."""
        hidden, head, key_heads = config.hidden_size, config.head_dim, config.num_key_value_heads
        assert key_heads is not None, "the config has filled it in"
        attention = hidden * head * (2 * config.num_attention_heads + 2 * key_heads)
        weights = config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size)
        pairs = 14.0 * config.num_attention_heads * head * config.num_hidden_layers
        return ModelCost(6.0 * (weights + hidden * config.vocab_size), pairs)

    def ideal(self, row: TreeRow) -> float:
        """FLOPs of distinct tokens and pairs over those of the flattened paths."""
        lengths = np.array([len(rows) for rows in row.rows_P], np.float64)
        flattened = self.per_token * lengths.sum() + self.per_pair * (lengths * (lengths + 1) / 2).sum()
        return float((self.per_token * row.num_rows + self.per_pair * row.num_pairs) / flattened)
