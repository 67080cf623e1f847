"""`Forward` by torch operations: for models of any size, and the reference of the compiled kernels.

N tokens, B of them decoding calls (one token each), then the pieces of prompts, one after the other
D head_dim, H hidden, V vocabulary, L positions that the longest of some calls reads
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from qwengyre.engines.kv import KVMemory
from qwengyre.engines.model import EngineWeights, rope_table
from qwengyre.engines.passes import Pass
from qwengyre.engines.sampler import sample
from qwengyre.models.placement import put

Attend = Callable[[int, torch.Tensor], torch.Tensor]


class TorchForward:
    """Reads `weights` and writes `memory` in place, on their device."""

    routes: np.ndarray | None = None

    def __init__(self, weights: EngineWeights, memory: KVMemory):
        self.weights, self.spec, self.device = weights, weights.spec, weights.device
        self.block_size = memory.block_size
        self.flat = [memory.blocks[layer].view(-1, self.spec.head_dim) for layer in range(self.spec.num_layers)]
        """Per layer (blocks * 2 * kv_heads * block_size, D)."""
        self.head_at = torch.arange(self.spec.kv_heads, device=self.device) * self.block_size
        self.value_offset = self.spec.kv_heads * self.block_size
        self.rope = torch.empty(0, device=self.device)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    @torch.inference_mode()
    def __call__(self, batch: Pass) -> tuple[list[int], list[float]]:
        return sample(self.logits(batch), batch.temperatures, batch.draws)

    def logits(self, batch: Pass) -> torch.Tensor:
        """(W, V) of the wanted tokens."""
        spec, eps, width = self.spec, self.spec.rms_eps, (self.spec.hidden,)
        num_qk = spec.heads + spec.kv_heads
        positions = self._put(batch.positions)
        attend = self._attention(batch)
        hidden = self.weights.embedding.index_select(0, self._put(batch.token_ids))
        rotation = self._rotations(batch).index_select(0, positions).unsqueeze(1)
        keys_at = self._where(self._put(batch.table_RB[batch.slots]), positions[:, None]).flatten()
        values_at = keys_at + self.value_offset
        for index, layer in enumerate(self.weights.layers):
            qkv = torch.mm(F.rms_norm(hidden, width, None, eps), layer.qkv).view(-1, num_qk + spec.kv_heads, spec.head_dim)
            qk = F.rms_norm(qkv[:, :num_qk], (spec.head_dim,), None, eps).mul_(layer.qk_norm)
            qk = torch.view_as_real(torch.view_as_complex(qk.view(-1, num_qk, spec.head_dim // 2, 2)) * rotation).flatten(2)
            self.flat[index].index_copy_(0, keys_at, qk[:, spec.heads :].reshape(-1, spec.head_dim))
            self.flat[index].index_copy_(0, values_at, qkv[:, num_qk:].reshape(-1, spec.head_dim))
            hidden = torch.addmm(hidden, attend(index, qk[:, : spec.heads]), layer.out)
            gate_up = torch.mm(F.rms_norm(hidden, width, None, eps), layer.gate_up)
            inner = F.silu(gate_up[:, : spec.intermediate]).mul_(gate_up[:, spec.intermediate :])
            hidden = torch.addmm(hidden, inner, layer.down)
        last = hidden.index_select(0, self._put(batch.wanted))
        return torch.mm(F.rms_norm(last, width, self.weights.norm, eps), self.weights.head)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return put(array, self.device)

    def _where(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index into `flat` of the keys at `positions` (C, L) of calls with blocks `table` (C, blocks): (C, kv_heads, L)."""
        block = table.gather(1, torch.div(positions, self.block_size, rounding_mode="floor"))
        at = block * (2 * self.value_offset) + positions % self.block_size
        return at.unsqueeze(1) + self.head_at[:, None]

    def _attention(self, batch: Pass) -> Attend:
        """Attention of one layer's queries (N, heads, D) to the calls of this pass: (N, heads * D)."""
        size, table = batch.num_decoding, batch.table_RB
        parts = []
        if size:
            parts.append((slice(0, size), self._attend_calls(table[batch.slots[:size]], batch.positions[:size, None])))
        at = size
        for slot, start, length in batch.pieces:
            parts.append(
                (slice(at, at + length), self._attend_calls(table[slot : slot + 1], np.arange(start, start + length)[None]))
            )
            at += length
        return lambda layer, query: torch.cat([attend(layer, query[part]) for part, attend in parts])

    def _attend_calls(self, table_CB: np.ndarray, positions_CQ: np.ndarray) -> Attend:
        """Queries at `positions` (C, Q) of C calls, flattened to (C * Q, heads, D)."""
        num_calls, num_queries = positions_CQ.shape
        positions = self._put(positions_CQ)
        reach = torch.arange(int(positions_CQ.max()) + 1, device=self.device)
        end = positions.max(1, keepdim=True).values
        keys_at = self._where(self._put(table_CB), torch.minimum(reach, end))
        shape = (num_calls, self.spec.kv_heads, len(reach), self.spec.head_dim)
        keys_at, values_at = keys_at.flatten(), (keys_at + self.value_offset).flatten()
        mask = (reach <= positions[..., None]).unsqueeze(1)

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            keys = self.flat[layer].index_select(0, keys_at).view(shape)
            values = self.flat[layer].index_select(0, values_at).view(shape)
            query = query.unflatten(0, (num_calls, num_queries)).transpose(1, 2)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2).reshape(num_calls * num_queries, -1)

        return attend

    def _rotations(self, batch: Pass) -> torch.Tensor:
        num_positions = batch.table_RB.shape[1] * self.block_size
        if len(self.rope) < num_positions:
            self.rope = rope_table(self.spec, num_positions).to(self.device)
        return self.rope
