"""The plan of one pass over a batch of calls: what each token sees in the blocks of its call, and the state that it starts from.

`N` tokens of the pass in `P` pieces: one token of each decoding call, then a piece of each prompt. `C` calls, `Q` queries and `L` keys of
each; `Hq` and `Hk` query and key heads, `d` and `e` widths of a key and a value. `models/plan.py` says what each method is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwengyre.engines.general.memory import GeneralMemory, StateMemory
from qwengyre.engines.passes import Pass
from qwengyre.models.placement import HOST, put
from qwengyre.models.plan import ScoreRule
from qwengyre.models.visibility import Visibility


class Part(NamedTuple):
    """Calls that attend together: tokens [start, end) of the pass, `Q` of each call."""

    start: int
    end: int
    num_calls: int
    rows: Tensor
    """(C * L,): where the tokens that some query of a call sees lie in a layer."""
    visible: Tensor
    """bool (C, 1, Q, L)."""


class PassPlan:
    def __init__(self, batch: Pass, memory: GeneralMemory, states: StateMemory):
        self.batch, self.memory, self.states, self.device = batch, memory, states, memory.device
        self.lengths = [1] * batch.num_decoding + [length for _, _, length in batch.pieces]
        first_P = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64) if self.lengths else np.zeros(0, np.int64)
        self.piece_N = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.offset_N = np.arange(len(batch.token_ids)) - first_P[self.piece_N]
        self.last_P = first_P + np.array(self.lengths, np.int64) - 1
        self.slots_P = batch.slots[first_P]
        self.num_attentions = self.num_convolutions = self.num_scans = 0
        self.rows_N = self._rows(self._put(batch.table_RB[batch.slots]), self._put(batch.positions[:, None]))
        self.chosen: list[np.ndarray] = []
        """uint8 (N, K): experts by router."""
        self._parts: dict[int, tuple[Visibility, list[Part]]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
        layer = self.memory.layers[self.num_attentions].view(-1, self.memory.layers[self.num_attentions].shape[2])
        shape = self.memory.shapes[self.num_attentions]
        self.num_attentions += 1
        kept = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (key, value)], 1)
        layer.index_copy_(0, self.rows_N.flatten(), kept)
        outs = [_attend(query[0, :, part.start : part.end], layer, shape, part, scores) for part in self._parts_of(scores.sees)]
        return torch.cat(outs)[None]

    def reach(self, own_nC: Tensor, num_taps: int) -> tuple[Tensor, np.ndarray]:
        """The kept inputs of each piece's call, then the pass's own."""
        state = self.states.convolution[self.num_convolutions]
        self.num_convolutions += 1
        slots_P, num_kept = self._put(self.slots_P), num_taps - 1
        kept = state[slots_P].flatten(0, 1)
        rows_MC = torch.cat([kept, own_nC])
        taps_K = np.arange(num_taps)
        at_NK = self.offset_N[:, None] - taps_K
        of_state_NK = self.piece_N[:, None] * num_kept + num_kept + at_NK
        place_NK = np.where(at_NK >= 0, len(kept) + np.arange(len(own_nC))[:, None] - taps_K, of_state_NK)
        if num_kept:
            state[slots_P] = rows_MC[self._put(place_NK[self.last_P, num_kept - 1 :: -1])]
        return rows_MC, np.where(taps_K <= self.batch.positions[:, None], place_NK, -1)

    def cuts(self) -> list[int]:
        return self.lengths

    def groups(self) -> Sequence[Sequence[int]]:
        """Decoding calls together, then each piece by itself."""
        num = self.batch.num_decoding
        return [*([range(num)] if num else []), *((piece,) for piece in range(num, len(self.lengths)))]

    def next_scan(self) -> PassStates:
        self.num_scans += 1
        return PassStates(self.states.scan[self.num_scans - 1], self.slots_P)

    def _put(self, array: np.ndarray) -> Tensor:
        return put(array, self.device)

    def choose(self, chosen_nK: Tensor) -> Tensor:
        """Those of the router, noted."""
        self.chosen.append(chosen_nK.to(torch.uint8).to(HOST).numpy())
        return chosen_nK

    def _rows(self, table_CB: Tensor, position_CL: Tensor) -> Tensor:
        size = self.memory.block_size
        return table_CB.gather(1, position_CL // size) * size + position_CL % size

    def _parts_of(self, sees: Visibility) -> list[Part]:
        """The same for all layers that share what they see."""
        if id(sees) not in self._parts:
            batch, size = self.batch, self.batch.num_decoding
            found = [self._decoding_part(sees)] if size else []
            for slot, start, length in batch.pieces:
                found.append(self._piece_part(batch.table_RB[slot : slot + 1], np.arange(start, start + length), size, sees))
                size += length
            self._parts[id(sees)] = sees, found
        return self._parts[id(sees)][1]

    def _decoding_part(self, sees: Visibility) -> Part:
        batch, size = self.batch, self.batch.num_decoding
        position_C, key_L = self._put(batch.positions[:size]), self._keys(batch.positions[:size], sees)
        table_CB = self._put(batch.table_RB[self.slots_P[:size]])
        rows_CL = self._rows(table_CB, torch.minimum(key_L[None], position_C[:, None]))
        return Part(0, size, size, rows_CL.flatten(), sees.sees(position_C, key_L)[:, None, None])

    def _piece_part(self, table_1B: np.ndarray, at_Q: np.ndarray, start: int, sees: Visibility) -> Part:
        position_Q, key_L = self._put(at_Q), self._keys(at_Q, sees)
        rows_L = self._rows(self._put(table_1B), key_L[None]).flatten()
        return Part(start, start + len(at_Q), 1, rows_L, sees.sees(position_Q, key_L)[None, None])

    def _keys(self, at_Q: np.ndarray, sees: Visibility) -> Tensor:
        """Positions that some of the queries sees."""
        end = int(at_Q.max()) + 1
        window = sees.window(end)
        return torch.arange(0 if window is None else max(0, int(at_Q.min()) - window + 1), end, device=self.device)


class PassStates:
    """States of one scan, in the slots of the calls."""

    def __init__(self, state: Tensor, slots_P: np.ndarray):
        self._state, self._slots_P = state, slots_P

    def before(self, group: Sequence[int], given: Tensor) -> Tensor:
        return self._state[self._of(group)]

    def after(self, group: Sequence[int], states: Tensor) -> None:
        self._state[self._of(group)] = states.to(self._state.dtype)

    def _of(self, group: Sequence[int]) -> Tensor:
        return put(self._slots_P[list(group)], self._state.device)


def _attend(query_HNd: Tensor, layer: Tensor, shape: tuple[int, int, int], part: Part, scores: ScoreRule) -> Tensor:
    """(tokens of the part, Hq, e)."""
    heads, width, _ = shape
    kept = layer.index_select(0, part.rows).unflatten(0, (part.num_calls, -1))
    key, value = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (kept[..., : heads * width], kept[..., heads * width :]))
    query = query_HNd.unflatten(1, (part.num_calls, -1)).transpose(0, 1)
    if scores.cap is None and scores.sinks_H is None:
        options = {"attn_mask": part.visible, "scale": scores.scale, "enable_gqa": query.shape[1] != heads}
        out = F.scaled_dot_product_attention(query, key, value, **options)
    else:
        out = _explicit(query, key, value, part.visible, scores)
    return out.transpose(1, 2).flatten(0, 1)


def _explicit(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: ScoreRule) -> Tensor:
    """(C, Hq, Q, e) with capped scores and sinks."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    product = (grouped @ key[:, :, None].transpose(-1, -2)).mul_(scores.scale)
    if scores.cap is not None:
        product.div_(scores.cap).tanh_().mul_(scores.cap)
    product.masked_fill_(~visible[:, :, None], -torch.inf)
    if scores.sinks_H is not None:
        sink = scores.sinks_H.to(product.dtype).view(1, key.shape[1], -1, 1, 1).expand(*product.shape[:-1], 1)
        product = torch.cat([product, sink], -1)
    weight = product.softmax(-1)[..., : key.shape[2]]
    out: Tensor = weight @ value[:, :, None]
    return out.flatten(1, 2)
