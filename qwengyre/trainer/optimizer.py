"""AdamW over one flat array (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Only the core has one.

`N` numbers, `B` of one block. Deterministic: the same gradients give bitwise the same weights.

Moments are in the dtype of sums, and so are the weights that it updates: where the model's are narrower, it keeps weights of its own
(`master_N`), of which the model's are the rounded ones. They lie beside the model's or in the host's memory. The update goes block by
block, so that beside the state there is never more than one block of intermediate numbers, whichever side computes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qwengyre.models.placement import HOST, wide
from qwengyre.trainer.config import TrainerConfig

BLOCK: Final = 1 << 24
"""Numbers that are updated at once: 64 MiB in fp32, enough to use the whole width of a bus or a memory."""


class AdamW:
    def __init__(self, weights_N: Tensor, decay_mask_N: Tensor, config: TrainerConfig):
        self.config, sums = config, wide(weights_N.dtype)
        device = HOST if config.optimizer_device == "host" else weights_N.device
        self.device, self._is_pinned = device, device == HOST and weights_N.is_cuda
        self.decay_mask_N = self._taken(decay_mask_N) if config.weight_decay else None
        self.first_N, self.second_N = (self._taken(torch.zeros_like(weights_N, dtype=sums, device=device)) for _ in range(2))
        self.master_N: Tensor | None = None
        """The weights in the dtype of sums; None: the model's own are those."""
        if sums != weights_N.dtype or device != weights_N.device:
            self.master_N = self._taken(weights_N.to(sums))
        self.num_updates = 0

    def learning_rate(self) -> float:
        """Of the next update."""
        config = self.config
        if self.num_updates >= config.warmup_steps:
            return config.learning_rate
        return config.learning_rate * (self.num_updates + 1) / config.warmup_steps

    @torch.no_grad()
    def update(self, weights_N: Tensor, sums_N: Tensor, factor: float = 1.0) -> float:
        """Change `weights_N` in place, by the gradient `factor * sums_N`, which stays as it is; return the change's sum of squares."""
        rate, squares = self.learning_rate(), 0.0
        self.num_updates += 1
        for start in range(0, len(weights_N), BLOCK):
            block = slice(start, min(start + BLOCK, len(weights_N)))
            gradient_B = sums_N[block].to(self.device) * factor
            kept_B = (weights_N if self.master_N is None else self.master_N)[block]
            change_B = self._change(block, kept_B, gradient_B, rate)
            kept_B.sub_(change_B)
            if self.master_N is not None:
                weights_N[block].copy_(kept_B)
            squares += float(torch.linalg.vector_norm(change_B)) ** 2
        return squares

    def _change(self, block: slice, weights_B: Tensor, gradient_B: Tensor, rate: float) -> Tensor:
        """What is subtracted (B,)."""
        config, first_B, second_B = self.config, self.first_N[block], self.second_N[block]
        first_B.lerp_(gradient_B, 1 - config.beta1)
        second_B.mul_(config.beta2).addcmul_(gradient_B, gradient_B, value=1 - config.beta2)
        first_correction = 1 - config.beta1**self.num_updates
        second_correction = 1 - config.beta2**self.num_updates
        change_B = torch.div(second_B, second_correction, out=gradient_B).sqrt_().add_(config.adam_epsilon)
        torch.div(first_B, change_B, out=change_B).div_(first_correction)
        if self.decay_mask_N is not None:
            change_B.addcmul_(weights_B, self.decay_mask_N[block], value=config.weight_decay)
        return change_B.mul_(rate)

    def _taken(self, values: Tensor) -> Tensor:
        """`values` where the state lies: on the host pinned, if a device copies to it by itself."""
        here = values.to(self.device)
        return here.pin_memory() if self._is_pinned else here
