"""What becomes of a tiny model of a family: exact, refused by name, or wrong. Used by tests and by `qwengyre doctor --models`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from qwengyre.core.errors import ModelRefused, UnsupportedModel
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.general.model import GeneralModel
from qwengyre.engines.general.trial import try_model
from qwengyre.gateway.rendering import Rendering
from qwengyre.models.rounding import probe_of
from qwengyre.testing.answers import TOOLS, difference, prompt_tails, random_answer
from qwengyre.testing.renderers import write_renderer_model
from qwengyre.testing.training import every_token, flat_gradient, paths_alone, random_paths
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import build_row
from qwengyre.transfer.api import Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_GAP = 1e-5
"""Of a log-prob, for each nat of the largest one; of a gradient, relative (L2)."""
OWN_ROUNDINGS = 4
"""Times what the model's own float32 forward is away from its float64 one, here and now: two sums of the same terms in another order are
each that far from the truth, and the largest difference over some hundred targets is seldom more than twice another draw of it. Counts
for models alone whose own rounding reaches MAX_GAP, as that of gated delta nets does on some processors; wrong ones began at 0.7 nats.
"""
VOCABULARY = 60
CHUNK_TOKENS = 7
PROMPT_TOKENS, ANSWER_TOKENS, MOVED_AFTER = 21, 16, 6
"""Of the call that moves: neither a multiple of a block."""
NUM_ANSWERS = 20
"""Of a policy that writes well, badly or not at all, cut at random."""


class TrialVerdict(NamedTuple):
    is_exact: bool
    reason: str = ""
    """Why the model was refused."""


class WrongModel(AssertionError):
    """A model that was taken, and computed otherwise than by itself."""


def try_trainer(model: PreTrainedModel) -> TrialVerdict:
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
        gaps = _gaps(output.logp_O.numpy(), flat_gradient(model), logp_O, gradient)
        if max(gaps) <= MAX_GAP:
            continue
        exact = paths_alone(deepcopy(model).double(), paths, row, token_row_O, coef_O)
        own = _gaps(logp_O, gradient.double(), *exact)
        if not all(gap <= max(MAX_GAP, OWN_ROUNDINGS * rounding) for gap, rounding in zip(gaps, own, strict=True)):
            raise WrongModel(
                f"{type(model).__name__}: log-probs {gaps[0]:.1e}, gradients {gaps[1]:.1e} off in chunks of {chunk_tokens}; by its own "
                f"rounding {own[0]:.1e} and {own[1]:.1e}"
            )
    return TrialVerdict(True)


def _gaps(logp_O: np.ndarray, gradient: torch.Tensor, expected_O: np.ndarray, expected: torch.Tensor) -> tuple[float, float]:
    """Of log-probs, for each ten nats of the largest, and of gradients, relative (L2)."""
    logp_gap = float(np.abs(logp_O - expected_O).max()) / max(1.0, float(np.abs(expected_O).max()) / 10)
    return logp_gap, float(torch.linalg.norm(gradient - expected) / torch.linalg.norm(expected))


def try_embedded(model: PreTrainedModel) -> TrialVerdict:
    """Two texts in pieces and token by token, then the probe in blocks, against the model's own forward. Raises WrongModel."""
    try:
        served = GeneralModel(model)
        try_model(served)
    except ModelRefused as error:
        return TrialVerdict(False, str(error).partition("cannot be served: ")[2] or str(error))
    limit = served.limit.num_tokens if served.limit else 2 * PROMPT_TOKENS
    probe = probe_of(model, min(33, limit))
    model.set_attn_implementation("qwengyre")
    core = _core(served)
    if reason := probe.refusal(core.logprobs(probe.token_ids), "float32"):
        raise WrongModel(f"{type(model).__name__}: {reason}")
    return TrialVerdict(True)


def try_move(model: PreTrainedModel) -> TrialVerdict:
    """A call that moves in mid-generation gets the tokens of one that stays, and computes nothing again. Raises WrongModel."""
    try:
        served = GeneralModel(model)
    except ModelRefused as error:
        return TrialVerdict(False, str(error))
    if served.limit and served.limit.num_tokens < PROMPT_TOKENS + ANSWER_TOKENS:
        return TrialVerdict(False, f"its texts end at {served.limit.num_tokens} tokens")
    prompt = np.random.default_rng(3).integers(0, served.vocabulary, PROMPT_TOKENS).astype(np.int32)
    expected = _answer(_core(served), prompt, 0, ANSWER_TOKENS)
    source, destination = _core(served), _core(served)
    done = _answer(source, prompt, 0, MOVED_AFTER)
    known = np.concatenate([prompt, np.array(done, np.int32)])
    num_tokens, regions = source.export_regions(known)
    num_tokens = destination.import_blocks(known[:num_tokens], lambda into: _copy(regions, into))
    rest = _answer(destination, known, MOVED_AFTER, ANSWER_TOKENS - MOVED_AFTER)
    if done + rest != expected or num_tokens != len(known) - 1 or destination.counts.tokens_prefilled > 1:
        raise WrongModel(
            f"{type(model).__name__}: a moved call knew {num_tokens} of {len(known)} tokens, and went on with {rest}"
        )
    return TrialVerdict(True)


def try_renderer(name: str, folder: Path) -> TrialVerdict:
    """Random answers, read piece by piece in random cuts, against the renderer's own reading of the whole. Raises WrongModel."""
    rendering = Rendering.from_folder(write_renderer_model(folder, name), {"name": name})
    rnd = random.Random(name)
    tails = prompt_tails(rendering, name)
    for _ in range(NUM_ANSWERS):
        ids = random_answer(rnd, name, rendering)
        found = difference(rendering, name, ids, rnd.choice(tails), rnd.choice(((), TOOLS)))
        if found is not None:
            raise WrongModel(f"{name}: {found}")
    return TrialVerdict(True)


def _core(served: GeneralModel) -> EngineCore:
    longest = min(64, served.limit.num_tokens if served.limit else 64)
    config = EngineConfig(max_running=2, max_context_tokens=longest, kv_blocks=16, block_size=8, state_snapshots=4)
    return EngineCore(served, config, version=0)


def _answer(core: EngineCore, prompt: np.ndarray, first_index: int, num_tokens: int) -> list[int]:
    core.submit(GenerateRequest("a", prompt.tobytes(), Sampling(1.0, num_tokens, (), 5, first_index)))
    found: list[int] = []
    while core.has_work():
        for chunk in core.iterate():
            found += chunk.token_ids
    return found


def _copy(regions: Mapping[str, Pieces], into: Mapping[str, Pieces]) -> None:
    """As a transport reads: regions may be in pieces at either end."""
    for name, targets in into.items():
        source = regions[name]
        rows, start = np.concatenate(source) if isinstance(source, list) else source, 0
        for target in targets if isinstance(targets, list) else [targets]:
            if target.ndim:
                np.copyto(target, rows[start : start + len(target)])
                start += len(target)
