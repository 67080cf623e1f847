"""What becomes of a tiny model of a family: exact, refused by name, or wrong. Used by tests and by the matrix of `qwengyre doctor`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from qwengyre.core.errors import UnsupportedModel
from qwengyre.testing.training import every_token, flat_gradient, paths_alone, random_paths
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import build_row

MAX_GAP = 1e-5
"""Of a log-prob, for each nat of the largest one; of a gradient, relative (L2)."""
VOCABULARY = 60
CHUNK_TOKENS = 7


class TrialVerdict(NamedTuple):
    is_exact: bool
    reason: str = ""
    """Why the model was refused."""


class WrongModel(AssertionError):
    """A model that was taken, and computed otherwise than by itself."""


def try_trainer(model: nn.Module) -> TrialVerdict:
    """Log-probs and gradients over a random forest, whole and in chunks, against each path run alone. Raises WrongModel."""
    paths = random_paths(np.random.default_rng(1), 8, 4, vocabulary=VOCABULARY)
    row = build_row(paths)
    targets, token_row_O = every_token(row)
    coef_O = np.random.default_rng(2).normal(size=len(token_row_O))
    for chunk_tokens in (row.num_rows, CHUNK_TOKENS):
        try:
            tree_model = TreeModel(model, TrainerConfig(chunk_tokens=chunk_tokens, head_logits=5 * 64))
        except UnsupportedModel as error:
            return TrialVerdict(False, error.reason)
        logp_O, gradient = paths_alone(model, paths, row, token_row_O, coef_O)
        model.set_attn_implementation("qwengyre")
        model.zero_grad()
        output = tree_model.train(row, targets, lambda logp: torch.from_numpy(coef_O).to(logp.dtype))
        gap = float(np.abs(output.logp_O.numpy() - logp_O).max()) / max(1.0, float(np.abs(logp_O).max()) / 10)
        gradient_gap = float(torch.linalg.norm(flat_gradient(model) - gradient) / torch.linalg.norm(gradient))
        if not (gap <= MAX_GAP and gradient_gap <= MAX_GAP):
            raise WrongModel(
                f"{type(model).__name__}: log-probs {gap:.1e}, gradients {gradient_gap:.1e} off in chunks of {chunk_tokens}"
            )
    return TrialVerdict(True)
