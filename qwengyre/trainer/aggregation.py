"""How token losses become the loss of a step: a weight per token now, one division when the step closes.

    name         loss of a step                                               weight of a token     divided by
    two-level    1/E sum over executions of 1/T_e sum over tokens   1 / T_e               executions E
    token        sum over tokens / tokens (DAPO, arXiv 2503.14476, eq. 8)     1                     trained tokens
    sequence     mean over trajectories of their token mean (GRPO, GSPO)      1 / |O_i|             trained trajectories
    constant     sum over tokens / constant, mean over trajectories           1 / constant          trained trajectories
                 (Dr. GRPO, arXiv 2503.20783, eq. 2)

E counts valid executions with advantage 0 too; trained tokens and trajectories count what was trained.
"""

from __future__ import annotations

import math

import numpy as np

from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.published import AggregationName


def token_weights(config: TrainerConfig, execution_tokens_O: np.ndarray, trajectory_tokens_O: np.ndarray) -> np.ndarray:
    """Weight of each token (O,), from T_e of its execution and |O_i| of its trajectory, both by token."""
    if config.aggregates == "two-level":
        return 1.0 / execution_tokens_O
    if config.aggregates == "sequence":
        return 1.0 / trajectory_tokens_O
    if config.aggregates == "constant":
        return np.full(len(execution_tokens_O), 1.0 / config.sequence_constant)
    return np.ones(len(execution_tokens_O))


def advantage_deviation(num_executions: int, squared_advantages: float) -> float:
    """Standard deviation of the advantages over the executions of a step. Their mean is 0, because that of every group is.

    REINFORCE++ (arXiv 2501.03262, section 3) divides advantages by it. Every loss here is proportional to |A| as long as the sign
    of A stays, so dividing the summed gradient, once the whole step is known, is the same.

    >>> advantage_deviation(4, 1.0 + 1.0 + 0.0 + 2.0)
    1.0
    """
    return math.sqrt(squared_advantages / num_executions) if num_executions else 0.0


def divisor(name: AggregationName, *, num_executions: int, num_tokens: float, num_trajectories: float) -> float:
    """What the summed gradient is divided by, once."""
    return {
        "two-level": float(num_executions),
        "token": num_tokens,
        "sequence": num_trajectories,
        "constant": num_trajectories,
    }[name]
