"""Attention over a tree row: one causal square per chain, merged with full rectangles by log-sum-exp. Exact, no copies.

`n` rows of this call, `R` rows of the whole row, `Hk` key heads, `G` query heads per key head, `d` head size.

Query heads that share keys are folded into rows of one head where a rectangle has more keys than rows. Every block is
differentiated with the *merged* output and log-sum-exp (softmax over a union of blocks: FlashAttention-2, arXiv 2307.08691,
section 3.1), so that dK and dV accumulate in place and nothing is gathered or kept twice. A sink is one more block, of one key
without a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwengyre.models.placement import wide
from qwengyre.trainer import sinks
from qwengyre.trainer.cache import LayerCache, sums_like
from qwengyre.trainer.kernels import kernel_for
from qwengyre.trainer.path_attention import PathAttention

if TYPE_CHECKING:
    from qwengyre.models.plan import ScoreRule
    from qwengyre.trainer.tree_plan import TreePlan


def attend(query: Tensor, key: Tensor, value: Tensor, tree: TreePlan, scores: ScoreRule) -> Tensor:
    """query (1, Hk * G, n, d), key (1, Hk, n, d), value (1, Hk, n, e) -> (1, n, Hk * G, e)."""
    width = value.shape[3]
    query, key, value = same_width(query, key, value)
    cache = tree.kept(key, value)
    window = scores.sees.window(tree.longest)
    over = ChainAttention if window is not None and window >= tree.longest else PathAttention
    inputs = (query, key, value, scores.sinks_H, tree, scores, cache)
    out: Tensor = over.apply(*inputs)  # type: ignore[no-untyped-call]  # torch has no type for it
    return out[..., :width]


def same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros after whichever is narrower, keys or values: the kernels take one width, and zeros change nothing."""
    missing = key.shape[3] - value.shape[3]
    if missing > 0:
        value = F.pad(value, (0, missing))
    elif missing < 0:
        query, key = F.pad(query, (0, -missing)), F.pad(key, (0, -missing))
    return query, key, value


class ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        tree: TreePlan,
        scores: ScoreRule,
        cache: LayerCache | None,
    ) -> Tensor:
        kernel, scale = kernel_for(query, scores.cap), scores.scale
        heads, keys, values = _views(query, key, value, cache)
        groups, n = heads.shape[1], heads.shape[2]
        out = query.new_empty(1, n, query.shape[1], query.shape[3], dtype=wide(query.dtype))
        out_heads = _heads(out, key.shape[1])
        lse = query.new_empty(key.shape[1], groups, n, dtype=kernel.lse_dtype(query))
        first = tree.squares.start
        for a, b in tree.squares.causal:
            rows = slice(a - first, b - first)
            part, part_lse = kernel.forward(heads[:, :, rows], keys[:, :, a:b], values[:, :, a:b], True, scale)
            out_heads[:, :, rows] = part
            lse[:, :, rows] = part_lse
        for block in tree.squares.full:
            rows, cols = slice(block.row_start - first, block.row_end - first), slice(block.key_start, block.key_end)
            part, part_lse = kernel.forward(heads[:, :, rows], keys[:, :, cols], values[:, :, cols], False, scale)
            _merge(out_heads[:, :, rows], lse[:, :, rows], part, part_lse)
        if sinks_H is not None:
            sinks.merge(out_heads, lse, sinks_H)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks_H)
        ctx.tree, ctx.kernel, ctx.scale, ctx.cache = tree, kernel, scale, cache
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks_H = ctx.saved_tensors
        kernel, scale, cache, squares = ctx.kernel, ctx.scale, ctx.cache, ctx.tree.squares
        heads, keys, values = _views(query, key, value, cache)
        grad_heads, out_heads = _heads(grad, key.shape[1]), _heads(out, key.shape[1])
        d_query = torch.zeros_like(out, dtype=wide(out.dtype))
        d_heads = _heads(d_query, key.shape[1])
        d_key, d_value = sums_like(key[0], value[0]) if cache is None else cache.gradients()
        first = squares.start
        blocks = [(a, b, a, b, True) for a, b in squares.causal]
        blocks += [(f.row_start, f.row_end, f.key_start, f.key_end, False) for f in squares.full]
        for a, b, c, d, causal in blocks:
            rows, cols = slice(a - first, b - first), slice(c, d)
            queries = [grad_heads[:, :, rows], heads[:, :, rows], out_heads[:, :, rows]]
            shared, lse_rows = [keys[:, :, cols], values[:, :, cols]], lse[:, :, rows]
            if not causal and b - a < d - c:
                queries, lse_rows = [q.flatten(1, 2)[:, None] for q in queries], lse_rows.flatten(1, 2)[:, None]
                shared = [x[:, :1] for x in shared]
            grad_rows, query_rows, out_rows = queries
            dq, dk, dv = kernel.backward(grad_rows, (query_rows, *shared), (out_rows, lse_rows), causal, scale)
            d_heads[:, :, rows] += dq.reshape(d_heads[:, :, rows].shape)
            d_key[:, cols] += dk.sum(1, dtype=d_key.dtype)
            d_value[:, cols] += dv.sum(1, dtype=d_value.dtype)
        own = ctx.tree.own
        d_sinks_H = None if sinks_H is None else sinks.gradient(grad_heads, out_heads, lse, sinks_H)
        d_query, d_key, d_value = (
            x.to(query.dtype) for x in (d_query.transpose(1, 2), d_key[:, own][None], d_value[:, own][None])
        )
        return d_query, d_key, d_value, d_sinks_H, None, None, None


def _heads(rows: Tensor, key_heads: int) -> Tensor:
    """(1, n, Hk * G, d) seen as (Hk, G, n, d)."""
    heads: Tensor = rows[0].transpose(0, 1).unflatten(0, (key_heads, -1))
    return heads


def _views(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as (Hk, G, n, d); keys and values as (Hk, G, R, d) with stride 0 over G: nothing is repeated."""
    heads = query[0].unflatten(0, (key.shape[1], -1))
    keys, values = (key[0], value[0]) if cache is None else (cache.key, cache.value)
    groups = heads.shape[1]
    return heads, keys[:, None].expand(-1, groups, -1, -1), values[:, None].expand(-1, groups, -1, -1)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """In place: the softmax over both key sets, from the softmax over each and its log-sum-exp."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1)).add_(part * (part_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)
