"""How long a text may be before the model itself changes what it makes of the tokens before it, or has no position for the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESCALED = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles, of all tokens, depend on how long the whole text is."""


class Limit(NamedTuple):
    num_tokens: int
    reason: str


def longest_text(model: PreTrainedModel) -> Limit | None:
    """The lowest limit of `model`, which may lie on the meta device; None: there is none."""
    found = [*_rotary(model.config.get_text_config()), *_learned(model)]
    return min(found, default=None)


def _rotary(config: Any) -> Iterator[Limit]:
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(part for part in given.values() if isinstance(part, dict))):
        if rope.get("rope_type") in RESCALED:
            length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            yield Limit(length, f"its rotary embeddings ({rope['rope_type']}) turn all tokens otherwise in a longer text")


def _learned(model: PreTrainedModel) -> Iterator[Limit]:
    """Embeddings of positions; some are offset by their `offset` rows."""
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module is not words and ("pos" in own or own == "wpe"):
            yield Limit(module.num_embeddings - getattr(module, "offset", 0), "it has no embedding for a later position")
