"""Attention in which a token does not see everything before it: what it sees lies along the path, not along rows.

Sliding windows (a row sees the ancestors less than `window` above it), and whatever else the model's mask says by positions. Each
chain is cut into tiles of rows; a tile gathers the few runs of ancestors that any of its rows can see and masks by position. Every
row is in one tile, so nothing is merged; with a window, gathered keys are at most window + tile long. They are made again in the
backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qwengyre.models.placement import put, wide
from qwengyre.trainer import sinks
from qwengyre.trainer.cache import LayerCache, sums_like
from qwengyre.trainer.kernels import kernel_for

if TYPE_CHECKING:
    from qwengyre.models.plan import ScoreRule
    from qwengyre.models.visibility import Visibility
    from qwengyre.trainer.tree_plan import TreePlan

TILE_ROWS = 512
"""Wide enough that gathering keys costs little beside attending to them, narrow enough that a tile's mask stays small."""


class Tile:
    __slots__ = ("keys", "mask", "rows")

    def __init__(self, rows: slice, keys: Tensor, mask: Tensor):
        self.rows, self.keys, self.mask = rows, keys, mask


def tiles(tree: TreePlan, sees: Visibility, like: Tensor) -> list[Tile]:
    """Tiles of the plan's rows: local row range, ancestors (row numbers, root first), additive mask (rows, keys)."""
    first, last, position_R = tree.squares.start, tree.squares.end, tree.row.position_R
    window = sees.window(tree.longest)
    found = []
    for chain in tree.row.chains:
        for start in range(max(chain.start, first), min(chain.end, last), TILE_ROWS):
            end = min(start + TILE_ROWS, chain.end, last)
            path = np.concatenate([*(np.arange(a, b) for a, b in chain.runs), np.arange(chain.start, end)])
            keys = path if window is None else path[max(int(position_R[start]) - window + 1, 0) :]
            queries, depths = (put(position_R[rows], like.device, torch.int64) for rows in (slice(start, end), keys))
            visible = sees.sees(queries, depths)
            seen = int(visible.any(0).int().argmax()) if window is None else 0
            mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)
            gathered = put(keys[seen:], like.device, torch.int64)
            found.append(Tile(slice(start - first, end - first), gathered, mask[:, seen:].contiguous()))
    return found


class PathAttention(torch.autograd.Function):
    """Inputs and output as `attention.ChainAttention`."""

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
        kernel, (keys, values) = kernel_for(query, scores.cap, is_masked=True), _sources(key, value, cache)
        groups = query.shape[1] // key.shape[1]
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3], dtype=wide(query.dtype))
        out_heads = out[0].transpose(0, 1).unflatten(0, (key.shape[1], groups))
        lse = query.new_empty(key.shape[1], groups, query.shape[2], dtype=kernel.lse_dtype(query))
        heads = query[0].unflatten(0, (key.shape[1], groups))
        for tile in tiles(tree, scores.sees, query):
            gathered = (_gather(keys, tile, groups), _gather(values, tile, groups))
            part, part_lse = kernel.forward(heads[:, :, tile.rows], *gathered, False, scores.scale, tile.mask)
            out_heads[:, :, tile.rows] = part
            lse[:, :, tile.rows] = part_lse
        if sinks_H is not None:
            sinks.merge(out_heads, lse, sinks_H)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks_H)
        ctx.tree, ctx.kernel, ctx.scores, ctx.cache = tree, kernel, scores._replace(sinks_H=None), cache
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks_H = ctx.saved_tensors
        kernel, scores, cache, (keys, values) = ctx.kernel, ctx.scores, ctx.cache, _sources(key, value, ctx.cache)
        split = (key.shape[1], query.shape[1] // key.shape[1])
        heads, grad_heads, out_heads = (
            x.unflatten(0, split) for x in (query[0], grad[0].transpose(0, 1), out[0].transpose(0, 1))
        )
        d_query = torch.empty_like(out)
        d_heads = d_query[0].transpose(0, 1).unflatten(0, split)
        d_key, d_value = sums_like(key[0], value[0]) if cache is None else cache.gradients()
        for tile in tiles(ctx.tree, scores.sees, query):
            inputs = (heads[:, :, tile.rows], _gather(keys, tile, split[1]), _gather(values, tile, split[1]))
            merged = (out_heads[:, :, tile.rows], lse[:, :, tile.rows])
            dq, dk, dv = kernel.backward(grad_heads[:, :, tile.rows], inputs, merged, False, scores.scale, tile.mask)
            d_heads[:, :, tile.rows] = dq
            d_key.index_add_(1, tile.keys, dk.sum(1, dtype=d_key.dtype))
            d_value.index_add_(1, tile.keys, dv.sum(1, dtype=d_value.dtype))
        own = ctx.tree.own
        d_sinks_H = None if sinks_H is None else sinks.gradient(grad_heads, out_heads, lse, sinks_H)
        d_keys, d_values = (x[:, own][None].to(query.dtype) for x in (d_key, d_value))
        return d_query.transpose(1, 2), d_keys, d_values, d_sinks_H, None, None, None


def _sources(key: Tensor, value: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
    return (key[0], value[0]) if cache is None else (cache.key, cache.value)


def _gather(source: Tensor, tile: Tile, groups: int) -> Tensor:
    return source[:, tile.keys][:, None].expand(-1, groups, -1, -1)
