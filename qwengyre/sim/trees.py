"""What training on trees costs beside training on each path by itself, as it was measured (docs/training.md)."""

from __future__ import annotations

from typing import Final

import numpy as np

MEASURED: Final = (
    (0.022, 0.025), (0.486, 0.484), (0.526, 0.528), (0.575, 0.602), (0.687, 0.726), (0.688, 0.733), (1.0, 1.0)
)  # fmt: skip
"""(distinct tokens, CPU time), both as shares of the flattened paths': `qwengyre bench tree-training`, column "chains"."""


def tree_cost(distinct_share: float) -> float:
    """Time of a tree as a share of its flattened paths', between the measured trees; below the least of them in proportion.

    >>> tree_cost(1.0), tree_cost(0.688)
    (1.0, 0.733)
    """
    shares, costs = zip(*MEASURED, strict=True)
    if distinct_share < shares[0]:
        return float(distinct_share * costs[0] / shares[0])
    return float(np.interp(distinct_share, shares, costs))
