"""What a policy has learned of the demonstrations: whether it is good enough to start from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qwengyre.sandbox.families.mini_repositories import OPERATORS
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.rows import Row
from qwengyre.warmup.tokenizer import is_copied, is_operator
from qwengyre.warmup.training import score_tokens


class Skill(msgspec.Struct, frozen=True):
    copying: float
    """Share of names and numbers, which can only be copied from the context, that the model finds most likely."""
    operators: float
    """Share of what the demonstrations tell about operators that it knows: 0 guesses, 1 knows how often which one is used."""

    def __str__(self) -> str:
        return f"copies {self.copying:.1%}, knows {max(0.0, self.operators):.0%} of the operators"


def measure(model: PreTrainedModel, rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast, config: WarmupConfig) -> Skill:
    """Skill on rows that were not learned from."""
    copying, _ = score_tokens(model, rows, is_copied(tokenizer))
    _, nats = score_tokens(model, rows, is_operator(tokenizer))
    return Skill(copying, share_known(nats, config))


def share_known(nats: float, config: WarmupConfig) -> float:
    """Where `nats` per operator lie between guessing (0) and knowing how the demonstrator draws (1)."""
    guessing = math.log(len(OPERATORS))
    return (guessing - nats) / (guessing - operator_entropy(config))


def operator_entropy(config: WarmupConfig) -> float:
    """Nats of an operator, given the word of the specification, as the demonstrator draws it.

    >>> round(operator_entropy(WarmupConfig(right_operator=0.5, usual_mistake=0.5)), 3)
    0.693
    """
    others = len(OPERATORS) - 2
    rest = (1 - config.right_operator - config.usual_mistake) / others
    return -sum(share * math.log(share) for share in (config.right_operator, config.usual_mistake, *[rest] * others) if share > 0)
