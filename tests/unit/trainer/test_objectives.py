"""Every objective against numbers worked out by hand: two trajectories, [2 tokens, A = +1] and [1 token, A = -2]."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch

from qwengyre.runtime.run_config import RunConfig
from qwengyre.trainer import published
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.objectives import OBJECTIVES, TokenBatch, coefficients, kl_to_reference
from qwengyre.trainer.published import PUBLISHED, ObjectiveName

LOG = math.log


def batch(ratios, *, reference=None):
    """Behavior log-probs are -1; log-probs are such that e^{r_t} are `ratios`."""
    behavior_O = torch.full((3,), -1.0, dtype=torch.float64)
    return TokenBatch(
        logp_O=behavior_O + torch.tensor(ratios, dtype=torch.float64).log(),
        behavior_O=behavior_O,
        advantage_O=torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64),
        trajectory_O=torch.tensor([0, 0, 1]),
        num_tokens_J=torch.tensor([2, 1]),
        reference_O=reference,
    )


def solve(name, ratios, clip=0.2, **changes):
    """With a symmetric `clip`; None for the clipping that the objective was published with."""
    clipping = {} if clip is None else {"clip_low": clip, "clip_high": clip}
    config = TrainerConfig(objective=name, **clipping, **changes)
    coef_O, loss = coefficients(batch(ratios), torch.ones(3, dtype=torch.float64), config)
    return coef_O.tolist(), loss


def near(*values):
    return pytest.approx(values, abs=1e-12)


def test_gspo_capped_weighs_tokens_by_their_ratio():
    coef_O, loss = solve("gspo-capped", [1.1, 0.9, 1.0])
    assert coef_O == near(-1.1, -0.9, 2.0)
    assert loss.loss_O.tolist() == near(1.1 * (1 - LOG(1.1)), 0.9 * (1 - LOG(0.9)), -2.0)
    assert not loss.clipped_O.any() and not loss.capped_O.any()


def test_gspo_capped_truncates_weights_at_the_cap():
    coef_O, loss = solve("gspo-capped", [8.0, 1 / 8, 1.0])  # the sequence ratio is 1: inside
    assert coef_O == near(-5.0, -1 / 8, 2.0)
    assert loss.capped_O.tolist() == [True, False, False]


def test_gspo_capped_drops_a_trajectory_beyond_the_range_in_the_direction_of_its_advantage():
    above = solve("gspo-capped", [1.5, 1.5, 1.5])  # s = 1.5: clipped for A > 0, kept for A < 0
    assert above[0] == near(0.0, 0.0, 3.0)
    assert above[1].clipped_O.tolist() == [True, True, False]
    below = solve("gspo-capped", [0.5, 0.5, 0.5])  # s = 0.5: kept for A > 0, clipped for A < 0
    assert below[0] == near(-0.5, -0.5, 0.0)


def test_gspo_capped_default_range_is_the_paper_s():
    config = TrainerConfig()
    assert (*config.clip_range, config.token_weight_cap) == (0.995, 1.005, 5.0)


def test_gspo_spreads_the_sequence_ratio_s_gradient_over_its_tokens():
    # s_0 = sqrt(1.1 * 0.9); each of the two tokens carries -A s, so d/dlogp_t of their sum is -A s (1/2 + 1/2)
    coef_O, loss = solve("gspo", [1.1, 0.9, 1.1])
    s = math.sqrt(1.1 * 0.9)
    assert coef_O == near(-s, -s, 2.2)
    assert loss.loss_O.tolist() == near(-s, -s, 2.2)


def test_gspo_has_no_gradient_outside_the_range():
    coef_O, loss = solve("gspo", [1.5, 1.5, 0.5])
    assert coef_O == near(0.0, 0.0, 0.0)
    assert loss.loss_O.tolist() == near(-1.2, -1.2, 1.6)
    assert loss.clipped_O.all()


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "reinforce-pp"])
def test_token_clipped_objectives_take_the_pessimistic_bound(name):
    coef_O, loss = solve(name, [1.1, 1.5, 0.5])
    assert coef_O == near(-1.1, 0.0, 0.0)
    assert loss.loss_O.tolist() == near(-1.1, -1.2, 1.6)
    assert loss.clipped_O.tolist() == [False, True, True]
    assert solve(name, [0.5, 0.5, 1.5])[0] == near(-0.5, -0.5, 3.0)  # moving back into the range is never clipped


def test_dapo_clips_higher_above_than_below():
    coef_O, loss = solve("dapo", [1.25, 1.3, 0.85], clip=None)
    assert coef_O == near(-1.25, 0.0, 1.7)
    assert loss.loss_O.tolist() == near(-1.25, -1.28, 1.7)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    coef_O, loss = solve("cispo", [3.0, 0.5, 1.0])
    assert coef_O == near(-1.2, -0.8, 2.0)
    assert loss.capped_O.tolist() == [True, True, False] and not loss.clipped_O.any()


def test_cispo_as_published_has_no_lower_bound():
    coef_O, loss = solve("cispo", [6.0, 0.01, 0.01], clip=None)
    assert coef_O == near(-5.0, -0.01, 0.02)
    assert loss.capped_O.tolist() == [True, False, False]


def test_every_objective_says_what_it_was_published_with():
    assert PUBLISHED.keys() == OBJECTIVES.keys() == set(get_args(ObjectiveName))
    rows = [row.split() for row in published.__doc__.splitlines() if row.startswith("    ") and row.split()[0] in PUBLISHED]
    told = {name: (float(low), float(high), aggregation) for name, low, high, aggregation, *_ in rows}
    assert told == {name: entry[:3] for name, entry in PUBLISHED.items()}
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    for name, low, high, aggregation, *_ in rows:
        assert f"| `{name}` | {low} | {high} | `{aggregation}` |" in page


def test_dapo_is_dapo_unless_a_key_says_otherwise():
    dapo = TrainerConfig(objective="dapo")
    assert dapo.clip_range == (0.8, 1.28) and dapo.aggregates == "token" and not dapo.normalizes_advantages
    changed = TrainerConfig(objective="dapo", clip_high=0.5, aggregation="two-level", normalize_advantages=True)
    assert changed.clip_range == (0.8, 1.5) and changed.aggregates == "two-level" and changed.normalizes_advantages


@pytest.mark.parametrize(("objective", "divides"), [("gspo-capped", False), ("grpo", True), ("dr-grpo", False), ("dapo", True)])
def test_a_run_scales_advantages_as_its_objective_was_published(objective, divides):
    tables = {"tasks": {"train": "t"}, "harness": {"command": ["h"]}, "trainer": {"objective": objective}}
    assert msgspec.convert(tables, RunConfig).trajectory.divide_by_std is divides
    own = {**tables, "trajectory": {"divide_by_std": not divides}}
    assert msgspec.convert(own, RunConfig).trajectory.divide_by_std is not divides


def test_kl_estimate_and_its_gradient():
    config = TrainerConfig(kl_coefficient=0.5, objective="grpo", clip_low=0.2, clip_high=0.2)
    reference_O = torch.full((3,), -1.0 + LOG(2.0), dtype=torch.float64)
    tokens = batch([1.0, 1.0, 1.0], reference=reference_O)
    assert kl_to_reference(tokens).tolist() == near(*[2 - LOG(2) - 1] * 3)
    coef_O, _ = coefficients(tokens, torch.ones(3, dtype=torch.float64), config)
    # d/dlogp (e^d - d - 1) = -e^d + 1 = -1, times 0.5, on top of -A
    assert coef_O.tolist() == near(-1.5, -1.5, 1.5)


def test_weights_scale_coefficients():
    coef_O, _ = coefficients(batch([1.0, 1.0, 1.0]), torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64), TrainerConfig())
    assert coef_O.tolist() == near(-0.5, -0.25, 4.0)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_on_policy_every_objective_is_the_plain_policy_gradient(name):
    coef_O, _ = solve(name, [1.0, 1.0, 1.0])
    assert coef_O == near(-1.0, -1.0, 2.0)
