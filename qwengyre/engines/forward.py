"""One pass of Qwen3 over the next tokens of all running calls: decoding rows and pieces of prompts together.

    N tokens of the pass = B decoding rows (one token each, rows 0..B-1) and then the pieces, one after the other
    D head_dim, H hidden, V vocabulary, L positions that attention reads (a multiple of STRIDE)

Rows 0..B-1 that do not decode take part with a token that is written to the scratch position and thrown away: a slice of
rows costs nothing, a selection would copy their keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights, rope_table

STRIDE = 64


class Piece:
    """`length` prompt tokens of one call from position `start`, whose keys and values go to `row`."""

    __slots__ = ("length", "mask", "row", "start")

    def __init__(self, row: int, start: int, length: int):
        self.row, self.start, self.length = row, start, length
        self.mask: torch.Tensor | None = None
        if start and length > 1:
            self.mask = torch.arange(start + length) <= torch.arange(start, start + length)[:, None]


class Pass:
    """What one forward computes. `token_ids`, `positions`, `row_of`: int64 (N,)."""

    __slots__ = ("num_decoding", "pieces", "positions", "reach", "row_of", "token_ids")

    def __init__(self, token_ids: torch.Tensor, positions: torch.Tensor, row_of: torch.Tensor, *, num_decoding: int, reach: int):
        self.token_ids, self.positions, self.row_of = token_ids, positions, row_of
        self.num_decoding = num_decoding
        self.reach = reach
        """Positions that the decoding rows read."""
        self.pieces: list[Piece] = []


class Forward:
    """The model on the weights and memory it is given. `mask` (rows, positions): 0 where a decoding row may look, else -inf."""

    def __init__(self, weights: EngineWeights, memory: KVMemory, mask: torch.Tensor):
        self.weights, self.memory, self.mask = weights, memory, mask
        self.spec = weights.spec
        self.rope = rope_table(self.spec, memory.num_positions)
        self._views: dict[tuple[int, int], tuple[list, list, torch.Tensor]] = {}

    def __call__(self, batch: Pass) -> torch.Tensor:
        """Logits (B + pieces, V): of every decoding row, then of the last token of each piece."""
        spec, eps, width = self.spec, self.spec.rms_eps, (self.spec.hidden,)
        num_qk = spec.heads + spec.kv_heads
        hidden = self.weights.embedding.index_select(0, batch.token_ids)
        rotation = self.rope.index_select(0, batch.positions).unsqueeze(1)
        keys_at = self.memory.key_base.index_select(0, batch.row_of).add_(batch.positions.unsqueeze(1)).flatten()
        values_at = keys_at + self.memory.value_offset
        for index, layer in enumerate(self.weights.layers):
            qkv = torch.mm(F.rms_norm(hidden, width, None, eps), layer.qkv).view(-1, num_qk + spec.kv_heads, spec.head_dim)
            qk = F.rms_norm(qkv[:, :num_qk], (spec.head_dim,), None, eps).mul_(layer.qk_norm)
            qk = torch.view_as_real(torch.view_as_complex(qk.view(-1, num_qk, spec.head_dim // 2, 2)) * rotation).flatten(2)
            flat = self.memory.flat[index]
            flat.index_copy_(0, keys_at, qk[:, spec.heads :].reshape(-1, spec.head_dim))
            flat.index_copy_(0, values_at, qkv[:, num_qk:].reshape(-1, spec.head_dim))
            hidden = torch.addmm(hidden, self._attend(index, qk[:, : spec.heads], batch), layer.out)
            gate_up = torch.mm(F.rms_norm(hidden, width, None, eps), layer.gate_up)
            inner = F.silu(gate_up[:, : spec.intermediate]).mul_(gate_up[:, spec.intermediate :])
            hidden = torch.addmm(hidden, inner, layer.down)
        return torch.mm(F.rms_norm(_last_tokens(hidden, batch), width, None, eps), self.weights.head)

    def _attend(self, layer: int, query: torch.Tensor, batch: Pass) -> torch.Tensor:
        """Attention of (N, heads, D) queries to their rows: (N, heads * D)."""
        size = batch.num_decoding
        if not batch.pieces:
            return self._attend_rows(layer, query, size, batch.reach)
        parts = [self._attend_rows(layer, query[:size], size, batch.reach)] if size else []
        at = size
        for piece in batch.pieces:
            parts.append(self._attend_piece(layer, query[at : at + piece.length], piece))
            at += piece.length
        return torch.cat(parts)

    def _attend_rows(self, layer: int, query: torch.Tensor, size: int, reach: int) -> torch.Tensor:
        keys, values, mask = self._row_views(size, reach)
        grouped = query.unflatten(1, (self.spec.kv_heads, -1))
        out = F.scaled_dot_product_attention(grouped, keys[layer], values[layer], attn_mask=mask)
        return out.reshape(size, -1)

    def _attend_piece(self, layer: int, query: torch.Tensor, piece: Piece) -> torch.Tensor:
        end = piece.start + piece.length
        keys, values = self.memory.rows[layer, piece.row, :, :, :end].unsqueeze(1)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=piece.mask,
            is_causal=not piece.start and piece.length > 1,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).reshape(piece.length, -1)

    def _row_views(self, size: int, reach: int) -> tuple[list, list, torch.Tensor]:
        """Keys, values by layer and mask of the first `size` rows and `reach` positions; making them takes longer than keeping."""
        key = (size, reach)
        if key not in self._views:
            rows = self.memory.rows
            self._views[key] = (
                [rows[layer, :size, 0, :, :reach] for layer in range(self.spec.num_layers)],
                [rows[layer, :size, 1, :, :reach] for layer in range(self.spec.num_layers)],
                self.mask[:size, None, None, :reach],
            )
        return self._views[key]


def _last_tokens(hidden: torch.Tensor, batch: Pass) -> torch.Tensor:
    if not batch.pieces:
        return hidden
    wanted, at = list(range(batch.num_decoding)), batch.num_decoding
    for piece in batch.pieces:
        at += piece.length
        wanted.append(at - 1)
    return hidden.index_select(0, torch.tensor(wanted))
