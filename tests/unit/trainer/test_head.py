"""The head without logits against torch's own log_softmax and autograd."""

from __future__ import annotations

import pytest
import torch

from qwengyre.trainer import head


@pytest.mark.parametrize("chunk", [100, 4])
def test_logprobs_entropy_and_gradients_equal_autograd(chunk):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randint(0, 9, (11,), generator=generator)
    temperature = torch.rand(11, dtype=torch.float64, generator=generator) + 0.5
    coef = torch.randn(11, dtype=torch.float64, generator=generator)

    logp_all = torch.log_softmax(hidden @ weight.T / temperature[:, None], -1)
    logp = logp_all.gather(1, target[:, None])[:, 0]
    (logp * coef).sum().backward()

    states = (hidden.detach(), weight.detach())
    result = head.logprobs(*states, target, temperature, chunk)
    weight_grad = torch.ones_like(weight)
    hidden_grad = head.backward(result, coef, states, (target, temperature), weight_grad, chunk)
    torch.testing.assert_close(result.logp_O, logp.detach())
    torch.testing.assert_close(result.entropy_O, -(logp_all.exp() * logp_all).sum(-1).detach())
    torch.testing.assert_close(hidden_grad, hidden.grad)
    torch.testing.assert_close(weight_grad - 1, weight.grad)
