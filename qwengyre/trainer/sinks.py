"""Attention sinks: a learned score for each head that takes weight and gives nothing (gpt-oss; arXiv 2309.17453).

`Hk` key heads, `G` query heads per key head, `n` rows, `d` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, sinks_H: Tensor) -> None:
    """In place, out (Hk, G, n, d) and lse (Hk, G, n): the softmax over all keys and the sink, from that over all keys."""
    merged = torch.logaddexp(lse, _by_head(sinks_H, lse))
    out.mul_((lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)


def gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks_H: Tensor) -> Tensor:
    """(Hk * G,), with the merged out and lse: the sink of a row has weight exp(sink - lse) and no value: -weight * (grad . out)."""
    weight = (_by_head(sinks_H, lse) - lse).exp_()
    into: Tensor = torch.linalg.vecdot(grad, out)
    return -(weight * into).sum(-1).flatten().to(sinks_H.dtype)


def _by_head(sinks_H: Tensor, lse: Tensor) -> Tensor:
    return sinks_H.to(lse.dtype).view(*lse.shape[:2], 1)
