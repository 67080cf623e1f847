"""The private operators that attention stands on: shapes, strides and meaning must stay what they are."""

from __future__ import annotations

import pytest
import torch

from qwengyre.trainer.kernels import CpuFlash


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_block_equals_softmax_attention_and_its_gradients(dtype, causal):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 17, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    scores = query @ key.transpose(-1, -2) * 0.3
    if causal:
        scores = scores.masked_fill(~torch.ones(17, 17).tril().bool(), -torch.inf)
    expected = scores.softmax(-1) @ value
    grad = torch.randn_like(expected)
    expected.backward(grad)
    kernel = CpuFlash()
    inputs = tuple(x.detach() for x in (query, key, value))
    out, lse = kernel.forward(*inputs, causal, 0.3)
    assert lse.dtype == kernel.lse_dtype(query)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    for found, leaf in zip(kernel.backward(grad, inputs, (out, lse), causal, 0.3), (query, key, value), strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-4, atol=1e-5)


def test_keys_may_have_stride_zero_over_query_groups():
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 9, 8), torch.randn(2, 1, 9, 8)
    kernel = CpuFlash()
    repeated = key.expand(-1, 3, -1, -1)
    torch.testing.assert_close(
        kernel.forward(query, repeated, repeated, True, 0.3)[0],
        kernel.forward(query, repeated.contiguous(), repeated.contiguous(), True, 0.3)[0],
    )
