from __future__ import annotations

import numpy as np
import pytest

from qwengyre.trainer.aggregation import divisor, token_weights
from qwengyre.trainer.config import TrainerConfig

# one execution with trajectories of 3 and 1 tokens, another with one of 2
EXECUTION_TOKENS = np.array([4, 4, 4, 4, 2, 2])
TRAJECTORY_TOKENS = np.array([3, 3, 3, 1, 2, 2])
LOSSES = np.array([1.0, 2.0, 3.0, 10.0, 4.0, 6.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("two-level", ((1 + 2 + 3 + 10) / 4 + (4 + 6) / 2) / 2),
        ("token", (1 + 2 + 3 + 10 + 4 + 6) / 6),
        ("sequence", (2.0 + 10.0 + 5.0) / 3),
        ("constant", (6.0 / 8 + 10.0 / 8 + 10.0 / 8) / 3),
    ],
)
def test_loss_of_a_step(name, expected):
    config = TrainerConfig(aggregation=name, sequence_constant=8.0)
    total = (token_weights(config, EXECUTION_TOKENS, TRAJECTORY_TOKENS) * LOSSES).sum()
    assert total / divisor(name, num_executions=2, num_tokens=6, num_trajectories=3) == pytest.approx(expected)


def test_number_of_paths_does_not_weigh_an_execution():
    weights = token_weights(TrainerConfig(), EXECUTION_TOKENS, TRAJECTORY_TOKENS)
    assert weights[:4].sum() == pytest.approx(weights[4:].sum()) == pytest.approx(1.0)
