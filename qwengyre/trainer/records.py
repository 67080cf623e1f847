"""What the trainer tells its cell. No torch here: the controller imports this.

Sums, never means: a step's E is known only when the step closes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class MicroStepStats(msgspec.Struct, frozen=True):
    """One micro-step: forward and backward. Sums over its executions; add the fields of a step's micro-steps."""

    micro_step: str
    trajectories: int
    """Trajectories that were trained."""
    trajectories_clipped: int
    """Those whose gradient the objective clipped away as a whole."""
    tokens_trained: int
    tokens_distinct: int
    """Rows that were computed."""
    tokens_flat: int
    """Rows that flattened paths would have had."""
    loss: float
    """Sum over executions of the weighted token losses; divided by E only in StepStats."""
    entropy: float
    """Sum over trained tokens, nats."""
    log_ratio: float
    """Sum over trained tokens of logp_theta - recorded behavior logp."""
    log_ratio_max: float
    """Largest absolute value of it."""
    tokens_clipped: int
    """Trained tokens with zero coefficient because the objective clipped them."""
    tokens_capped: int
    """Trained tokens whose importance weight met the cap."""
    seconds: float


def total_of(name: str, parts: Sequence[MicroStepStats]) -> MicroStepStats:
    """What the ranks of a cell made of one micro-step, or cells of all of a step, as one record of that name."""
    numbers = [field for field in MicroStepStats.__struct_fields__ if field != "micro_step"]
    sums = {field: sum(getattr(part, field) for part in parts) for field in numbers}
    largest = {field: max((getattr(part, field) for part in parts), default=0.0) for field in ("log_ratio_max", "seconds")}
    return MicroStepStats(micro_step=name, **(sums | largest))


class StepStats(msgspec.Struct, frozen=True):
    """One optimizer step on the core."""

    step: int
    applied: bool
    reason: str
    """Why nothing was applied: no executions, nothing trained, a loss or a gradient that is not finite; empty when applied."""
    num_executions: int
    gradient_norm: float
    """L2, after division, before clipping. nan when there was nothing to divide by."""
    clip_scale: float
    """What clipping multiplied the gradient by, 1.0 when it was inside."""
    learning_rate: float
    update_norm: float
    seconds: float


class AuditReport(msgspec.Struct, frozen=True):
    """Recorded log-probs against a forward under each token's own policy version."""

    num_tokens: int
    max_logprob_gap: float
    mean_logprob_gap: float
    worst_execution: str
