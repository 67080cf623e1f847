"""Gated delta net layers over a tree row against another implementation: `tree-recurrence` over TRL's rows. Both are exact.

Needs `pip install --no-deps tree-recurrence trl`: `make test-recurrence`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tree_recurrence
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from qwengyre.bench import trl_rows
from qwengyre.models.recurrences import CONV, RULE
from qwengyre.testing.training import every_token, flat_gradient, random_paths, tiny_hybrid
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import build_row

MAX_LOGPROB_GAP, MAX_GRADIENT_GAP = 5e-5, 1e-4
"""The delta rule runs in fp32; where a sequence is cut moves its results by 2e-5."""


@pytest.fixture(autouse=True)
def _modules_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """What our trainer puts into transformers' modules is taken out again: the other implementation would run on it."""
    for module in (modeling_qwen3_next, modeling_qwen3_5):
        for name in (CONV, RULE):
            monkeypatch.setattr(module, name, getattr(module, name))


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
@pytest.mark.parametrize("seed", range(6))
def test_log_probs_and_gradients_agree(family, seed):
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    paths = [path for path in random_paths(rng, 8, 5) if len(path.token_ids_T) > 1]
    row = build_row(paths)
    targets, token_row_O = every_token(row)
    coef_O = torch.from_numpy(rng.normal(size=len(token_row_O)).astype(np.float32))
    model = tiny_hybrid(family)
    logp_O, gradient = theirs(model, paths, row, targets, token_row_O, coef_O)
    model.zero_grad()
    output = TreeModel(model, TrainerConfig(chunk_tokens=7)).train(row, targets, lambda logp: coef_O)
    assert float((output.logp_O - logp_O).abs().max()) <= MAX_LOGPROB_GAP
    assert float(torch.linalg.norm(flat_gradient(model) - gradient) / torch.linalg.norm(gradient)) <= MAX_GRADIENT_GAP


def theirs(model, paths, row, targets, token_row_O, coef_O):
    """Log-probs (O,) in the order of our targets, and the gradient of sum(coef * logp)."""
    seen, fresh_P = set(), []
    for rows_T in row.rows_P:
        fresh_P.append(np.array([at > 0 and index not in seen for at, index in enumerate(rows_T.tolist())]))
        seen.update(rows_T.tolist())
    packed = trl_rows.pack(trl_rows.packing_module(), paths, fresh_P)
    model.set_attn_implementation(trl_rows.register(packed))
    support = tree_recurrence.install(model)
    assert support.mode == "tree", support.reason
    try:
        tree = {name: packed[name] for name in tree_recurrence.TREE_KWARGS if name in packed}
        inputs = {"input_ids": packed["input_ids"][None], "position_ids": packed["position_ids"][None].long()}
        logits_RV = model(**inputs, use_cache=False, **tree).logits[0]
        row_of_token = np.concatenate([rows_T[fresh_T] for rows_T, fresh_T in zip(row.rows_P, fresh_P, strict=True)])
        at_O = np.argsort(row_of_token)[np.searchsorted(np.sort(row_of_token), token_row_O)]
        place_O = packed["token_index"][torch.from_numpy(at_O)]
        temperature_O = torch.from_numpy(targets.temperature_O).float()
        logp_OV = torch.log_softmax(logits_RV[place_O] / temperature_O[:, None], -1)
        logp_O = logp_OV.gather(1, torch.from_numpy(targets.token_O)[:, None])[:, 0]
        model.zero_grad()
        (logp_O * coef_O).sum().backward()
    finally:
        tree_recurrence.uninstall(model)
    return logp_O.detach(), flat_gradient(model)
