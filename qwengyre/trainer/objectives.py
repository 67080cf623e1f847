"""Losses of trained tokens, behind one interface: a batch of tokens in, a loss per token out.

`O` trained tokens, `J` trajectories. How token losses become one number is `aggregation`'s business; what else an objective was
published with is in `published`. r_t is
logp_theta - recorded log-prob, where each token was recorded under the policy version that sampled it.

    name          ratio      clipping                                       source
    gspo-capped   token      sequence: no gradient outside, weight capped   this project's reading of the paper
    gspo          sequence   sequence                                       arXiv 2507.18071, eq. 5-7
    cispo         token      weight only: every token keeps its gradient    arXiv 2506.13585, eq. 4-5
    all others    token      token                                          arXiv 2402.03300, eq. 3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.published import ObjectiveName


class TokenBatch(NamedTuple):
    """Trained tokens of whole trajectories (a trajectory is never cut), in any order."""

    logp_O: Tensor
    """Differentiable."""
    behavior_O: Tensor
    advantage_O: Tensor
    trajectory_O: Tensor
    """int64 in [0, J)"""
    num_tokens_J: Tensor
    """Trained tokens of each trajectory."""
    reference_O: Tensor | None = None


class TokenLoss(NamedTuple):
    loss_O: Tensor
    """Its derivative by logp_O is all that the backward needs. Before weighting by the aggregation."""
    clipped_O: Tensor
    """bool: this token has no policy gradient because of clipping."""
    capped_O: Tensor
    """bool: this token's importance weight was truncated."""


Objective = Callable[[TokenBatch, TrainerConfig], TokenLoss]


def sequence_log_ratio(batch: TokenBatch) -> Tensor:
    """Mean of r_t over the trained tokens of each token's trajectory (O,), differentiable: log s_i of GSPO (eq. 7)."""
    ratio_O = batch.logp_O - batch.behavior_O
    sums_J = ratio_O.new_zeros(len(batch.num_tokens_J)).index_add(0, batch.trajectory_O, ratio_O)
    return (sums_J / batch.num_tokens_J)[batch.trajectory_O]


def gspo_capped(batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
    """-A * stopgrad(min(e^{r_t}, cap)) * logp_theta; none if A > 0 and s_i > 1 + high, or A < 0 and s_i < 1 - low."""
    weight_O = torch.exp((batch.logp_O - batch.behavior_O).detach())
    clipped_O = _outside(sequence_log_ratio(batch).detach().exp(), batch.advantage_O, config)
    capped_O = weight_O > config.token_weight_cap
    kept_O = weight_O.clamp(max=config.token_weight_cap).masked_fill(clipped_O, 0.0)
    return TokenLoss(-batch.advantage_O * kept_O * batch.logp_O, clipped_O, capped_O & ~clipped_O)


def gspo(batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
    """-min(s_i A, clip(s_i) A) on every token, so that the mean over the trajectory's tokens is GSPO's sequence loss."""
    return _surrogate(sequence_log_ratio(batch).exp(), batch, config)


def token_clipped(batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = e^{r_t}: GRPO, Dr. GRPO, DAPO and REINFORCE++."""
    return _surrogate(torch.exp(batch.logp_O - batch.behavior_O), batch, config)


def cispo(batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
    """-A * stopgrad(clip(e^{r_t}, 1 - low, 1 + high)) * logp_theta."""
    ratio_O = torch.exp((batch.logp_O - batch.behavior_O).detach())
    weight_O = ratio_O.clamp(*config.clip_range)
    return TokenLoss(
        -batch.advantage_O * weight_O * batch.logp_O, torch.zeros_like(ratio_O, dtype=torch.bool), weight_O != ratio_O
    )


def kl_to_reference(batch: TokenBatch) -> Tensor:
    """The low-variance estimate e^d - d - 1 with d = logp_ref - logp_theta (GRPO, arXiv 2402.03300, eq. 4), per token."""
    assert batch.reference_O is not None, "with a KL term there are log-probs of the reference"
    delta_O = batch.reference_O - batch.logp_O
    return torch.exp(delta_O) - delta_O - 1


def _surrogate(ratio_O: Tensor, batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
    clamped_O = ratio_O.clamp(*config.clip_range)
    loss_O = -torch.minimum(ratio_O * batch.advantage_O, clamped_O * batch.advantage_O)
    clipped_O = _outside(ratio_O.detach(), batch.advantage_O, config)
    return TokenLoss(loss_O, clipped_O, torch.zeros_like(clipped_O))


def _outside(ratio_O: Tensor, advantage_O: Tensor, config: TrainerConfig) -> Tensor:
    least, greatest = config.clip_range
    return ((advantage_O > 0) & (ratio_O > greatest)) | ((advantage_O < 0) & (ratio_O < least))


OBJECTIVES: Final[dict[ObjectiveName, Objective]] = {
    "gspo-capped": gspo_capped,
    "gspo": gspo,
    "grpo": token_clipped,
    "dr-grpo": token_clipped,
    "dapo": token_clipped,
    "cispo": cispo,
    "reinforce-pp": token_clipped,
}


def coefficients(
    batch: TokenBatch, weight_O: Tensor, config: TrainerConfig, objective: Objective | None = None
) -> tuple[Tensor, TokenLoss]:
    """Return d sum(weight * loss) / dlogp (O,) and the losses; the KL term is inside both when it is on.

    `objective` takes the place of the one that the config names.
    """
    leaf_O = batch.logp_O.detach().requires_grad_()
    batch = batch._replace(logp_O=leaf_O)
    with torch.enable_grad():
        loss = (objective or OBJECTIVES[config.objective])(batch, config)
        if batch.reference_O is not None:
            loss = loss._replace(loss_O=loss.loss_O + config.kl_coefficient * kl_to_reference(batch))
        (coef_O,) = torch.autograd.grad((loss.loss_O * weight_O).sum(), leaf_O)
    return coef_O, loss._replace(loss_O=loss.loss_O.detach())
