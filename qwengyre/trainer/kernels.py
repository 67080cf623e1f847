"""One attention block, forward and backward, on the device at hand.

Queries (B, H, n, d), keys and values (B, H, m, d) with any strides, log-sum-exp (B, H, n). The operators are private to
torch and pinned by tests/unit/trainer/test_kernels.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qwengyre.models.placement import wide


class Kernel(Protocol):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output (B, H, n, d) and log-sum-exp (B, H, n). `causal` needs n == m; `mask` (n, m) is added to the scores."""
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK, dV of this block; `merged` is output and log-sum-exp over all keys of these queries."""
        ...

    def lse_dtype(self, query: Tensor) -> torch.dtype: ...


class CpuFlash:
    """`_scaled_dot_product_flash_attention_for_cpu`: tiled, no scores are kept."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *inputs, *merged, 0.0, causal, attn_mask=mask, scale=scale
        )
        return d_query, d_key, d_value

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        return wide(query.dtype)


class CudaFlash:
    """`_flash_attention_forward`, which returns the log-sum-exp. Half precision, no mask. Has not run: no GPU was at hand."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert mask is None, "kernel_for takes another one then"
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (query, key, value)),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out.transpose(1, 2), lse

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert mask is None, "kernel_for takes another one then"
        query, key, value = (x.transpose(1, 2) for x in inputs)
        out, lse = merged
        seed = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.transpose(1, 2).contiguous(),
            query,
            key,
            value,
            out.transpose(1, 2).contiguous(),
            lse.contiguous(),
            None,
            None,
            query.shape[1],
            key.shape[1],
            0.0,
            causal,
            seed,
            torch.zeros((), dtype=torch.uint64, device=grad.device),
            scale=scale,
        )
        return tuple(x.transpose(1, 2) for x in grads)

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        return wide(query.dtype)


TILE_SCORES = 1 << 22
"""Scores that `Plain` holds at once, of all heads: 16 MiB in fp32, which a processor's cache and memory hand over at one go."""


class PlainKernel:
    """By matrix products, some rows at a time: for capped scores (`cap * tanh(score / cap)`), which no fused kernel here has, and for
    devices and dtypes that lack one.
    """

    def __init__(self, cap: float | None = None):
        self.cap = cap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=self.lse_dtype(query))
        for rows in _tiles(query, key):
            scores, _ = self._scores(query[:, :, rows], key, scale)
            _hide(scores, rows, causal, mask)
            lse[:, :, rows] = torch.logsumexp(scores, -1)
            out[:, :, rows] = (scores - lse[:, :, rows, None]).exp_().to(value.dtype) @ value
        return out, lse

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (query, key, value), (out, lse) = inputs, merged
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (key, value))
        for rows in _tiles(query, key):
            scores, slope = self._scores(query[:, :, rows], key, scale)
            _hide(scores, rows, causal, mask)
            weight = scores.sub_(lse[:, :, rows, None]).exp_()
            d_value += weight.to(grad.dtype).transpose(-1, -2) @ grad[:, :, rows]
            inner = torch.linalg.vecdot(grad[:, :, rows], out[:, :, rows])[..., None]
            d_weight = (grad[:, :, rows] @ value.transpose(-1, -2)).to(weight.dtype)
            d_scores = d_weight.sub_(inner).mul_(weight).mul_(slope).to(query.dtype)
            d_query[:, :, rows] = d_scores @ key
            d_key += d_scores.transpose(-1, -2) @ query[:, :, rows]
        return d_query, d_key, d_value

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        return wide(query.dtype)

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor | float]:
        """Scores (B, H, rows, m) in the dtype of sums, and their derivative by query @ key."""
        scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)).mul_(scale)
        if self.cap is None:
            return scores, scale
        bent = scores.div_(self.cap).tanh_()
        return bent * self.cap, bent.square_().neg_().add_(1).mul_(scale)


def _tiles(query: Tensor, key: Tensor) -> list[slice]:
    per_row = query.shape[0] * query.shape[1] * key.shape[2]
    size = max(1, TILE_SCORES // max(per_row, 1))
    return [slice(start, min(start + size, query.shape[2])) for start in range(0, query.shape[2], size)]


def _hide(scores: Tensor, rows: slice, causal: bool, mask: Tensor | None) -> None:
    if mask is not None:
        scores.add_(mask[rows])
    if causal:
        later = (
            torch.arange(scores.shape[-1], device=scores.device)
            > torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        )
        scores.masked_fill_(later, -torch.inf)


_CPU, _CUDA, _PLAIN = CpuFlash(), CudaFlash(), PlainKernel()


def kernel_for(query: Tensor, cap: float | None = None, *, is_masked: bool = False) -> Kernel:
    """The fastest that can do it."""
    if cap is not None:
        return PlainKernel(cap)
    if query.device.type in ("cpu", "meta"):  # on meta memory is counted, and this one takes what fused ones take
        return _CPU
    if not query.is_cuda:
        return _PLAIN
    return _CUDA if query.dtype in (torch.float16, torch.bfloat16) and not is_masked else _PLAIN
