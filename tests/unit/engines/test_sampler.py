"""Draws: what they depend on, and that the compiled and the torch ones agree."""

from __future__ import annotations

import numpy as np
import torch

from qwengyre.engines.sampler import DRAWS, sample, uniforms


def test_draws_depend_on_seed_and_block_alone():
    assert uniforms(3, 0) == uniforms(3, 0)
    assert uniforms(3, 0) != uniforms(3, 1)
    assert uniforms(3, 0) != uniforms(4, 0)
    assert uniforms(2**70 + 5, 0) == uniforms(2**70 + 5, 0)
    assert len(uniforms(3, 0)) == DRAWS


def test_frequencies_follow_the_distribution_at_each_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -50.0])
    for temperature in (0.5, 1.0, 2.0):
        draws = np.linspace(0, 1, 4000, endpoint=False).tolist()
        tokens, logprobs = sample(logits.repeat(4000, 1), [temperature] * 4000, draws)
        expected = torch.softmax(logits / temperature, -1)
        found = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
        assert (found - expected).abs().max() < 1e-3
        for token in set(tokens):
            assert abs(logprobs[tokens.index(token)] - float(expected[token].log())) < 1e-5


def test_greedy_takes_the_first_of_the_most_likely_and_reports_its_logprob_at_one():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 0.5]])
    tokens, logprobs = sample(logits, [0.0, 1.0], [0.99, 0.0])
    assert tokens == [1, 0]
    assert abs(logprobs[0] - float(torch.log_softmax(logits[0], -1)[1])) < 1e-6


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((3, 64), -1e4)
    logits[:, 17] = 0.0
    tokens, logprobs = sample(logits, [1.0] * 3, [0.0, 0.5, 1 - 2**-53])
    assert tokens == [17] * 3
    assert logprobs == [0.0] * 3
