"""One attention block, forward and backward, on the device at hand.

Queries (B, H, n, d), keys and values (B, H, m, d) with any strides, log-sum-exp (B, H, n). The operators are private to
torch and pinned by tests/unit/trainer/test_kernels.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return output (B, H, n, d) and log-sum-exp (B, H, n). `causal` needs n == m."""
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK, dV of this block; `merged` is output and log-sum-exp over all keys of these queries."""
        ...

    def lse_dtype(self, query: Tensor) -> torch.dtype: ...


class CpuFlash:
    """`_scaled_dot_product_flash_attention_for_cpu`: tiled, no scores are kept."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *inputs, *merged, 0.0, causal, attn_mask=mask, scale=scale
        )

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        return torch.float64 if query.dtype == torch.float64 else torch.float32


class CudaFlash:
    """`_flash_attention_forward`, which returns the log-sum-exp. Half precision only. Has not run: no GPU was at hand."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
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
    ) -> tuple[Tensor, Tensor, Tensor]:
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
        return torch.float32


_CPU, _CUDA = CpuFlash(), CudaFlash()


def kernel_for(query: Tensor) -> Kernel:
    return _CUDA if query.is_cuda else _CPU
