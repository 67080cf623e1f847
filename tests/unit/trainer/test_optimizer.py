from __future__ import annotations

import pytest
import torch

from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.optimizer import AdamW


def test_updates_equal_torch_s_adamw():
    torch.manual_seed(0)
    config = TrainerConfig(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9)
    decayed, spared = (torch.nn.Parameter(torch.randn(5, dtype=torch.float64)) for _ in range(2))
    weights = torch.cat([decayed.detach(), spared.detach()])
    mask = torch.cat([torch.ones(5), torch.zeros(5)]).double()
    ours = AdamW(weights, mask, config)
    theirs = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": 0.1}, {"params": [spared], "weight_decay": 0.0}], lr=0.01, betas=(0.8, 0.9)
    )
    for _ in range(4):
        gradient = torch.randn(10, dtype=torch.float64)
        decayed.grad, spared.grad = gradient[:5].clone(), gradient[5:].clone()
        before = weights.clone()
        squares = ours.update(weights, gradient)
        theirs.step()
        torch.testing.assert_close(weights, torch.cat([decayed.detach(), spared.detach()]))
        assert squares == pytest.approx(float((before - weights).square().sum()))


def test_learning_rate_warms_up_linearly():
    optimizer = AdamW(torch.zeros(1), torch.ones(1), TrainerConfig(learning_rate=1.0, warmup_steps=4))
    rates = []
    for _ in range(6):
        rates.append(optimizer.learning_rate())
        optimizer.update(torch.zeros(1), torch.ones(1))
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
