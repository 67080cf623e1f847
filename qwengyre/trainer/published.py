"""What each objective was published with, beside the loss of a token: clipping, aggregation, and how advantages are scaled.

A run file names an objective and gets all of it; a key that it sets itself wins.

    name          low      high     aggregation   advantages                     source
    gspo-capped   0.005    0.005    two-level     group mean subtracted          this project's reading of the paper
    gspo          0.0003   0.0004   sequence      and divided by the group's std arXiv 2507.18071, section 5.1
    grpo          0.2      0.2      sequence      and divided by the group's std arXiv 2402.03300, eq. 3, section 4.1.2
    dr-grpo       0.2      0.2      constant      group mean subtracted          arXiv 2503.20783, eq. 2
    dapo          0.2      0.28     token         and divided by the group's std arXiv 2503.14476, eq. 8, section 4.1
    cispo         1        4        token         and divided by the group's std arXiv 2506.13585, eq. 4-5: no lower bound
    reinforce-pp  0.2      0.2      token         and divided by the step's std  arXiv 2501.03262, baseline variant

CISPO's source tunes its upper bound and does not give it: 4 lets weights grow to 5, where `gspo-capped` caps them too. DAPO's dynamic sampling
has no switch: groups whose rewards are all equal have advantage 0 and train nothing. A KL term is never on by itself.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

ObjectiveName = Literal["gspo-capped", "gspo", "grpo", "dr-grpo", "dapo", "cispo", "reinforce-pp"]
AggregationName = Literal["two-level", "token", "sequence", "constant"]


class PublishedWith(NamedTuple):
    clip_low: float
    """Ratios below 1 - clip_low are clipped when A < 0."""
    clip_high: float
    """Ratios above 1 + clip_high are clipped when A > 0."""
    aggregation: AggregationName
    divides_by_std: bool = False
    """The advantage of an execution, by the standard deviation of its group's rewards."""
    normalizes_advantages: bool = False
    """By their standard deviation over the whole step."""


PUBLISHED: Final[dict[ObjectiveName, PublishedWith]] = {
    "gspo-capped": PublishedWith(0.005, 0.005, "two-level"),
    "gspo": PublishedWith(3e-4, 4e-4, "sequence", divides_by_std=True),
    "grpo": PublishedWith(0.2, 0.2, "sequence", divides_by_std=True),
    "dr-grpo": PublishedWith(0.2, 0.2, "constant"),
    "dapo": PublishedWith(0.2, 0.28, "token", divides_by_std=True),
    "cispo": PublishedWith(1.0, 4.0, "token", divides_by_std=True),
    "reinforce-pp": PublishedWith(0.2, 0.2, "token", normalizes_advantages=True),
}
