"""Draw the next tokens, with the log-prob of each under the distribution that it was drawn from."""

from __future__ import annotations

import numpy as np
import torch

from qwengyre.models.placement import HOST, put

DRAWS = 256


def uniforms(seed: int, block: int) -> list[float]:
    """The numbers in [0, 1) of token indices block * DRAWS and on, a function of its arguments alone.

    Philox is counter-based: (seed, block) is its key, so no state travels with a call that moves.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), block], dtype=np.uint64)))
    numbers: list[float] = generator.random(DRAWS).tolist()
    return numbers


def sample(logits: torch.Tensor, temperatures: list[float], draws: list[float]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs (R,) of `logits` (R, V), row by row."""
    tokens, logprobs = draw(logits, temperatures, draws)
    return tokens.squeeze(1).to(HOST).tolist(), logprobs.squeeze(1).to(HOST).tolist()


def draw(logits: torch.Tensor, temperatures: list[float], draws: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs (R, 1) of float32 `logits` (R, V), on their device.

    Inverse of the distribution function: the first token whose cumulative probability exceeds the draw. T = 0 takes the
    most likely token and reports its log-prob at T = 1.
    """
    device = logits.device
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / put(np.array([temperature or 1.0 for temperature in temperatures], np.float32), device).unsqueeze(1)
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = (put(np.array(draws, np.float64), device) * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    if 0.0 in temperatures:
        greedy = put(np.array([temperature == 0.0 for temperature in temperatures]), device).unsqueeze(1)
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    return tokens, logprobs.gather(1, tokens)
