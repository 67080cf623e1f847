"""`Forward` by torch operations: for models of any size, and the reference of the compiled kernels.

N tokens, B of them decoding calls (one token each), then the pieces of prompts, one after the other
D head_dim, H hidden, V vocabulary, L positions that the longest decoding call reads
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights, rope_table
from qwengyre.engines.passes import Pass
from qwengyre.engines.sampler import sample

Attend = Callable[[int, torch.Tensor], torch.Tensor]


class TorchForward:
    """Reads `weights` and writes `memory` in place."""

    def __init__(self, weights: EngineWeights, memory: KVMemory):
        self.weights, self.memory, self.spec = weights, memory, weights.spec
        self.rope = rope_table(self.spec, memory.num_positions)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    @torch.inference_mode()
    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        return sample(self.logits(batch), batch.temperatures, batch.draws)

    def logits(self, batch: Pass) -> torch.Tensor:
        """(W, V) of the wanted tokens."""
        spec, eps, width = self.spec, self.spec.rms_eps, (self.spec.hidden,)
        num_qk = spec.heads + spec.kv_heads
        positions, attend = torch.from_numpy(batch.positions), self._attention(batch)
        hidden = self.weights.embedding.index_select(0, torch.from_numpy(batch.token_ids))
        rotation = self.rope.index_select(0, positions).unsqueeze(1)
        keys_at = (self.memory.key_base.index_select(0, torch.from_numpy(batch.row_of)) + positions.unsqueeze(1)).flatten()
        values_at = keys_at + self.memory.value_offset
        for index, layer in enumerate(self.weights.layers):
            qkv = torch.mm(F.rms_norm(hidden, width, None, eps), layer.qkv).view(-1, num_qk + spec.kv_heads, spec.head_dim)
            qk = F.rms_norm(qkv[:, :num_qk], (spec.head_dim,), None, eps).mul_(layer.qk_norm)
            qk = torch.view_as_real(torch.view_as_complex(qk.view(-1, num_qk, spec.head_dim // 2, 2)) * rotation).flatten(2)
            flat = self.memory.flat[index]
            flat.index_copy_(0, keys_at, qk[:, spec.heads :].reshape(-1, spec.head_dim))
            flat.index_copy_(0, values_at, qkv[:, num_qk:].reshape(-1, spec.head_dim))
            hidden = torch.addmm(hidden, attend(index, qk[:, : spec.heads]), layer.out)
            gate_up = torch.mm(F.rms_norm(hidden, width, None, eps), layer.gate_up)
            inner = F.silu(gate_up[:, : spec.intermediate]).mul_(gate_up[:, spec.intermediate :])
            hidden = torch.addmm(hidden, inner, layer.down)
        last = hidden.index_select(0, torch.from_numpy(batch.wanted))
        return torch.mm(F.rms_norm(last, width, None, eps), self.weights.head)

    def _attention(self, batch: Pass) -> Attend:
        """Attention of one layer's queries (N, heads, D) to the rows of this pass: (N, heads * D)."""
        size, parts = batch.num_decoding, []
        if size:
            parts.append((slice(0, size), self._attend_rows(batch)))
        at = size
        for row, start, length in batch.pieces:
            parts.append((slice(at, at + length), self._attend_piece(row, start, length)))
            at += length
        return lambda layer, query: torch.cat([attend(layer, query[part]) for part, attend in parts])

    def _attend_rows(self, batch: Pass) -> Attend:
        size = batch.num_decoding
        row_B, position_B = torch.from_numpy(batch.row_of[:size]), torch.from_numpy(batch.positions[:size])
        reach = int(batch.positions[:size].max()) + 1
        mask = (torch.arange(reach) <= position_B[:, None])[:, None, None]
        are_first = bool((row_B == torch.arange(size)).all())

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            rows = self.memory.rows[layer, :, :, :, :reach]
            rows = rows[:size] if are_first else rows.index_select(0, row_B)
            grouped = query.unflatten(1, (self.spec.kv_heads, -1))
            return F.scaled_dot_product_attention(grouped, rows[:, 0], rows[:, 1], attn_mask=mask).reshape(size, -1)

        return attend

    def _attend_piece(self, row: int, start: int, length: int) -> Attend:
        end = start + length
        mask = torch.arange(end) <= torch.arange(start, end)[:, None]

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            keys, values = self.memory.rows[layer, row, :, :, :end].unsqueeze(1)
            query = query.transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1).reshape(length, -1)

        return attend
