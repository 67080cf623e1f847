"""AdamW over one flat array (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Only the core has one.

`N` numbers. Deterministic: the same gradients give bitwise the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwengyre.trainer.config import TrainerConfig


class AdamW:
    def __init__(self, weights_N: Tensor, decay_mask_N: Tensor, config: TrainerConfig):
        self.config, self.decay_mask_N = config, decay_mask_N
        self.first_N, self.second_N = torch.zeros_like(weights_N), torch.zeros_like(weights_N)
        self.num_updates = 0

    def learning_rate(self) -> float:
        """Of the next update."""
        config = self.config
        if self.num_updates >= config.warmup_steps:
            return config.learning_rate
        return config.learning_rate * (self.num_updates + 1) / config.warmup_steps

    @torch.no_grad()
    def update(self, weights_N: Tensor, gradient_N: Tensor) -> Tensor:
        """Change `weights_N` in place; return what was subtracted (N,)."""
        config, rate = self.config, self.learning_rate()
        self.num_updates += 1
        self.first_N.lerp_(gradient_N, 1 - config.beta1)
        self.second_N.mul_(config.beta2).addcmul_(gradient_N, gradient_N, value=1 - config.beta2)
        first_correction = 1 - config.beta1**self.num_updates
        second_correction = 1 - config.beta2**self.num_updates
        change_N = (self.second_N / second_correction).sqrt_().add_(config.adam_epsilon)
        torch.div(self.first_N, change_N, out=change_N).div_(first_correction)
        if config.weight_decay:
            change_N.addcmul_(weights_N, self.decay_mask_N, value=config.weight_decay)
        change_N.mul_(rate)
        weights_N.sub_(change_N)
        return change_N
