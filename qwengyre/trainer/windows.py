"""Sliding-window layers over a tree row: the window runs along the path, not along rows.

A row sees the ancestors whose depth is less than `window` above its own. Each chain is cut into tiles of rows; a tile
gathers the few runs of ancestors that any of its rows can see and masks by depth. Every row is in one tile, so nothing
is merged; gathered keys are at most window + tile long and are made again in the backward.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qwengyre.trainer.cache import LayerCache, TreePlan
from qwengyre.trainer.kernels import CpuFlash

TILE_ROWS = 512


class Tile:
    __slots__ = ("keys", "mask", "rows")

    def __init__(self, rows: slice, keys: Tensor, mask: Tensor):
        self.rows, self.keys, self.mask = rows, keys, mask


def tiles(tree: TreePlan, window: int, like: Tensor) -> list[Tile]:
    """Tiles of the plan's rows: local row range, ancestors (row numbers, root first), additive mask (rows, keys)."""
    first, last, position_R = tree.squares.start, tree.squares.end, tree.row.position_R
    found = []
    for chain in tree.row.chains:
        for start in range(max(chain.start, first), min(chain.end, last), TILE_ROWS):
            end = min(start + TILE_ROWS, chain.end, last)
            path = np.concatenate([*(np.arange(a, b) for a, b in chain.runs), np.arange(chain.start, end)])
            keys = path[max(int(position_R[start]) - window + 1, 0) :]
            depth = position_R[start:end, None].astype(np.int64) - position_R[keys][None, :]
            hidden = (depth < 0) | (depth >= window)
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            found.append(Tile(slice(start - first, end - first), torch.from_numpy(keys), mask))
    return found


class WindowAttention(torch.autograd.Function):
    """Inputs and output as `attention.ChainAttention`. CPU only."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, tree: TreePlan, window: int, scale: float, cache: LayerCache | None
    ):
        kernel, (keys, values) = CpuFlash(), _sources(key, value, cache)
        groups = query.shape[1] // key.shape[1]
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        out_heads = out[0].transpose(0, 1).unflatten(0, (key.shape[1], groups))
        lse = query.new_empty(key.shape[1], groups, query.shape[2], dtype=kernel.lse_dtype(query))
        heads = query[0].unflatten(0, (key.shape[1], groups))
        for tile in tiles(tree, window, query):
            gathered = (_gather(keys, tile, groups), _gather(values, tile, groups))
            part, part_lse = kernel.forward(heads[:, :, tile.rows], *gathered, False, scale, tile.mask)
            out_heads[:, :, tile.rows] = part
            lse[:, :, tile.rows] = part_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree, ctx.window, ctx.scale, ctx.cache = tree, window, scale, cache
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        kernel, cache, (keys, values) = CpuFlash(), ctx.cache, _sources(key, value, ctx.cache)
        split = (key.shape[1], query.shape[1] // key.shape[1])
        heads, grad_heads, out_heads = (
            x.unflatten(0, split) for x in (query[0], grad[0].transpose(0, 1), out[0].transpose(0, 1))
        )
        d_query = torch.empty_like(out)
        d_heads = d_query[0].transpose(0, 1).unflatten(0, split)
        d_key, d_value = (torch.zeros_like(key[0]), torch.zeros_like(value[0])) if cache is None else cache.gradients()
        for tile in tiles(ctx.tree, ctx.window, query):
            inputs = (heads[:, :, tile.rows], _gather(keys, tile, split[1]), _gather(values, tile, split[1]))
            merged = (out_heads[:, :, tile.rows], lse[:, :, tile.rows])
            dq, dk, dv = kernel.backward(grad_heads[:, :, tile.rows], inputs, merged, False, ctx.scale, tile.mask)
            d_heads[:, :, tile.rows] = dq
            d_key.index_add_(1, tile.keys, dk.sum(1))
            d_value.index_add_(1, tile.keys, dv.sum(1))
        own = slice(ctx.tree.squares.start, ctx.tree.squares.end)
        return d_query.transpose(1, 2), d_key[:, own][None], d_value[:, own][None], None, None, None, None


def _sources(key: Tensor, value: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
    return (key[0], value[0]) if cache is None else (cache.key, cache.value)


def _gather(source: Tensor, tile: Tile, groups: int) -> Tensor:
    return source[:, tile.keys][:, None].expand(-1, groups, -1, -1)
