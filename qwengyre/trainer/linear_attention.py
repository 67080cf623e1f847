"""Gated delta net layers (Qwen3-Next, Qwen3.5 ...) over tree rows: the recurrent state and the short convolution fork.

`R` rows, `n` rows of this chunk, `C` channels, `K` taps of the convolution.

transformers' layers call two functions of their modeling module and hand the forward's keywords through:
`causal_conv1d_fn` and `torch_chunk_gated_delta_rule`. Both are replaced there by versions that, when `tree` is among the
keywords, follow parents instead of rows, and that are the originals otherwise.

* Convolution: tap j of a row reads the ancestor j above it. One gather per tap, no loop over branches.
* Recurrence (arXiv 2412.06464, eq. 10): chains are cut where something branches off; each piece starts from the state
  behind its parent row, so that every distinct token is scanned once.

With chunks, what rows of later chunks read goes through `Store`, and its gradient comes back with the earlier chunk's backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.trainer.cache import TreePlan

CONV, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


def install(model: nn.Module) -> int:
    """Make the linear-attention layers of `model` follow trees; return how many there are.

    Raises LookupError when their modeling module lacks one of the two functions.
    """
    layers = [m for m in model.modules() if getattr(m, "layer_type", None) == "linear_attention" and hasattr(m, "conv1d")]
    for layer in layers:
        module = sys.modules[type(layer).__module__]
        for name, wrap in ((CONV, _tree_convolution), (RULE, _tree_rule)):
            original = getattr(module, name, None)
            if original is None:
                raise LookupError(f"{module.__name__} has no {name}")
            if not hasattr(original, "follows_trees"):
                setattr(module, name, wrap(original))
        if _name_layer not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_name_layer, with_kwargs=True)
    return len(layers)


def _name_layer(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if (tree := kwargs.get("tree")) is not None:
        tree.linear_layer = layer.layer_idx
        tree.linear_calls += 1


def _tree_convolution(original: Callable) -> Callable:
    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any) -> Tensor:
        """x (1, C, n), weight (C, K) -> (1, C, n)."""
        if (tree := kwargs.pop("tree", None)) is None:
            return original(x, weight, bias, activation=activation, **kwargs)
        rows_MC, above_nK = _readable(x[0].T, tree, weight.shape[1])
        out = bias if bias is not None else 0
        for tap in range(weight.shape[1]):
            exists_n = torch.from_numpy(above_nK[:, tap] >= 0)
            taken = rows_MC.index_select(0, torch.from_numpy(np.maximum(above_nK[:, tap], 0)))
            out = out + taken * exists_n[:, None] * weight[:, weight.shape[1] - 1 - tap]
        if activation is not None:
            from transformers.activations import ACT2FN

            out = ACT2FN[activation](out)
        return out.T[None].to(x.dtype)

    convolve.follows_trees = True
    return convolve


def _readable(own_nC: Tensor, tree: TreePlan, num_taps: int) -> tuple[Tensor, np.ndarray]:
    """Rows that the taps read (M, C), and for each row of the plan where in them its ancestors 0..K-1 are (n, K), -1 for none.

    M is the plan's rows, preceded by the few rows of earlier chunks that some tap reaches.
    """
    start, end = tree.squares.start, tree.squares.end
    columns = [np.arange(start, end)]
    for _ in range(num_taps - 1):
        above = columns[-1]
        columns.append(np.where(above >= 0, tree.row.parent_R[np.maximum(above, 0)], -1))
    above_nK = np.stack(columns, 1).astype(np.int64)
    outside = np.unique(above_nK[(above_nK >= 0) & (above_nK < start)])
    places = np.where(above_nK >= start, above_nK - start + len(outside), np.searchsorted(outside, above_nK))
    if tree.cache is not None:
        store = _store(tree, "conv")
        fetched = store.fetch(outside.tolist(), own_nC)
        store.keep(range(start, end), own_nC, tree)
        own_nC = torch.cat([fetched, own_nC]) if len(outside) else own_nC
    return own_nC, np.where(above_nK >= 0, places, -1)


def _tree_rule(original: Callable) -> Callable:
    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any):
        """As the original; heads on axis 2, tokens on axis 1."""
        if (tree := kwargs.pop("tree", None)) is None:
            return original(query, key, value, g=g, beta=beta, **kwargs)
        kwargs.pop("cu_seqlens", None)
        kwargs.update(output_final_state=True)
        pieces, states, outs = forks(tree), {}, []
        lengths = [end - start for start, end in pieces]
        inputs = zip(*(torch.split(x, lengths, dim=1) for x in (query, key, value, g, beta)), strict=True)
        for (start, end), (q, k, v, decay, strength) in zip(pieces, inputs, strict=True):
            parent = int(tree.row.parent_R[start])
            if 0 <= parent < tree.squares.start and parent not in states:
                states[parent] = _store(tree, "state").fetch([parent], query)
            kwargs.update(initial_state=states.get(parent), chunk_size=_chunk_size(end - start))
            out, state = original(q, k, v, g=decay, beta=strength, **kwargs)
            states[end - 1] = state
            if tree.cache is not None:
                _store(tree, "state").keep([end - 1], state, tree)
            outs.append(out)
        return torch.cat(outs, 1), None

    rule.follows_trees = True
    return rule


def _chunk_size(num_tokens: int) -> int:
    return 64 if num_tokens > 32 else 32 if num_tokens > 16 else 16


def forks(tree: TreePlan) -> list[tuple[int, int]]:
    """Cut the plan's rows behind every row that has a child which is not the next row."""
    start, end, parent_R = tree.squares.start, tree.squares.end, tree.row.parent_R
    cuts = {start, end}
    for chain in tree.row.chains:
        cuts.add(chain.start)
        if parent_R[chain.start] >= 0:
            cuts.add(int(parent_R[chain.start]) + 1)
    edges = sorted(cut for cut in cuts if start <= cut <= end)
    return list(pairwise(edges))


def _store(tree: TreePlan, kind: str) -> Store:
    return tree.cache.states.setdefault((kind, tree.linear_layer), Store())


class Store:
    """Values behind rows that rows of later chunks read, and the gradients that those send back."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def fetch(self, rows: list[int], anchor: Tensor) -> Tensor:
        """Values behind `rows` (len(rows), ...), differentiable when `anchor` is."""
        return _Fetch.apply(anchor, self, rows)

    def keep(self, rows: Sequence[int], values: Tensor, tree: TreePlan) -> None:
        """Store `values` (len(rows), ...); in the backward of this chunk what later chunks sent back is their gradient."""
        self.values.update(zip(rows, values.detach(), strict=True))
        if values.requires_grad:
            tree.exports.append((values, lambda: self._sent_back(rows, values)))

    def _sent_back(self, rows: Sequence[int], values: Tensor) -> Tensor | None:
        found = [(i, self.gradients.pop(row)) for i, row in enumerate(rows) if row in self.gradients]
        if not found:
            return None
        gradient = torch.zeros_like(values)
        for i, sent in found:
            gradient[i] = sent
        return gradient


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, store: Store, rows: list[int]) -> Tensor:
        ctx.store, ctx.rows = store, rows
        return torch.stack([store.values[row] for row in rows]) if rows else anchor.new_empty(0, *anchor.shape[1:])

    @staticmethod
    def backward(ctx, grad: Tensor):
        for row, sent in zip(ctx.rows, grad, strict=True):
            before = ctx.store.gradients.get(row)
            ctx.store.gradients[row] = sent.clone() if before is None else before + sent
        return None, None, None
