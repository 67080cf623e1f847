"""A model is tried before it serves: two texts, in pieces and then token by token, against its own forward."""

from __future__ import annotations

import numpy as np
import torch

from qwengyre.core.errors import ModelRefused, UnsupportedModel
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.general.model import GeneralModel
from qwengyre.engines.passes import LoadedModel, Pass
from qwengyre.models.follow import sentence
from qwengyre.models.placement import HOST

NUM_TOKENS, BLOCK = 11, 4
PIECES = ((0, 3), (3, 4), (4, 9))
"""Of each text; one token a pass follows."""
ROUNDINGS = 64
"""Differences that rounding may make, in units of eps * sqrt(layers) for each nat of the largest logit, as in trainer/trial.py."""
TRIES = 3


def try_model(model: GeneralModel) -> None:
    """Raises ModelRefused when what would be served is not what the model computes by itself."""
    config = EngineConfig(max_running=2, max_context_tokens=NUM_TOKENS, kv_blocks=8, block_size=BLOCK, state_snapshots=1)
    reasons = []
    for attempt in range(TRIES):
        texts = np.random.default_rng(attempt).integers(0, model.vocabulary, (2, NUM_TOKENS))
        try:
            served, own = _served(model.open(config, HOST), texts), _own(model, texts)
        except UnsupportedModel as error:
            raise ModelRefused(f"{type(model.model).__name__} cannot be served: {error.reason}") from error
        except Exception as error:  # whatever a model's own code raises is a reason to refuse it
            raise ModelRefused(f"{type(model.model).__name__} cannot be served: {sentence(error)}") from error
        gap = float((torch.log_softmax(served, -1) - torch.log_softmax(own, -1)).abs().max())
        bound = ROUNDINGS * torch.finfo(torch.float32).eps * max(1, model.num_layers) ** 0.5 * max(1.0, float(own.abs().max()))
        if gap <= bound:
            return
        reasons.append(f"log-probs by blocks are up to {gap:.2g} away from those of its own forward (rounding: {bound:.1g})")
    raise ModelRefused(f"{type(model.model).__name__} cannot be served: {reasons[-1]}")


def _served(opened: LoadedModel, texts: np.ndarray) -> torch.Tensor:
    """Logits after every token from the last of `PIECES` on, (texts, tokens, V)."""
    if opened.states is not None:
        for slot in range(len(texts)):
            opened.states.clear(slot)
    table_RB = np.arange(6).reshape(2, 3)[:, ::-1].copy()
    found = []
    for start, end in PIECES:
        pieces = [(slot, start, end - start) for slot in range(len(texts))]
        found.append(_logits(opened, texts, table_RB, pieces, num_decoding=0))
    for position in range(PIECES[-1][1], texts.shape[1]):
        found.append(
            _logits(opened, texts, table_RB, [(slot, position, 1) for slot in range(len(texts))], num_decoding=len(texts))
        )
    return torch.cat(found, 1)


def _logits(
    opened: LoadedModel, texts: np.ndarray, table_RB: np.ndarray, pieces: list[tuple[int, int, int]], num_decoding: int
) -> torch.Tensor:
    """(texts, tokens of this pass, V)."""
    positions = np.concatenate([np.arange(start, start + length) for _, start, length in pieces])
    slots = np.concatenate([np.full(length, slot) for slot, _, length in pieces])
    batch = Pass(
        *(texts[slots, positions], positions, slots, np.arange(len(slots)), table_RB),
        temperatures=[],
        draws=[],
        num_decoding=num_decoding,
        pieces=[] if num_decoding else pieces,
    )
    logits: torch.Tensor = opened.forward.logits(batch).unflatten(0, (len(texts), -1))
    return logits


@torch.inference_mode()
def _own(model: GeneralModel, texts: np.ndarray) -> torch.Tensor:
    """Logits after every token, (texts, tokens, V), by the model as transformers has it."""
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        return torch.stack([model.model(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0] for text in texts])
    finally:
        model.model.set_attn_implementation(before)
