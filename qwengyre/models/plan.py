"""Who comes before whom among the tokens of one forward pass: what stands in for "the tokens are one text, in order".

A transformers model computes token by token, except where tokens meet: in attention, in short convolutions and in recurrent
scans. There `interface.py` and `recurrences.py` ask the plan of the pass. The trainer's plan is a tree, the engine's a batch of
calls; the model's own code in between does not know.

`n` tokens of this pass, `C` channels, `Hq` query heads, `Hk` key heads, `d` width of a key, `e` width of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from qwengyre.models.visibility import Visibility


class ScoreRule(NamedTuple):
    """How a layer turns a query and the keys it sees into weights, beyond their product."""

    scale: float
    sees: Visibility
    cap: float | None = None
    """Scores are `cap * tanh(score / cap)`."""
    sinks_H: Tensor | None = None
    """(Hq,): one more score for each head, which takes weight and gives nothing."""


class States(Protocol):
    """The recurrent states of one scan, handed from piece to piece."""

    def before(self, group: Sequence[int], given: Tensor) -> Tensor | None:
        """(len(group), ...): the states that these pieces start from; None: all start from nothing. `given` is one of their inputs."""
        ...

    def after(self, group: Sequence[int], states: Tensor) -> None:
        """The states that these pieces end with."""
        ...


class LayerPlan(Protocol):
    """Layers ask in the order in which they run, which is the same in every pass."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
        """query (1, Hq, n, d), key (1, Hk, n, d), value (1, Hk, n, e) -> (1, n, Hq, e)."""
        ...

    def reach(self, own_nC: Tensor, num_taps: int) -> tuple[Tensor, np.ndarray]:
        """What a convolution of `num_taps` taps reads: rows (M, C), and for each token where in them the tokens 0, 1 ... before it
        are (n, num_taps), -1 for none.
        """
        ...

    def cuts(self) -> list[int]:
        """Lengths of the pieces, in the order of the tokens: each is scanned from one state to the next."""
        ...

    def groups(self) -> Sequence[Sequence[int]]:
        """Pieces by number, in an order in which they can be scanned. Those of a group are equally long and scanned together."""
        ...

    def next_scan(self) -> States: ...

    def choose(self, chosen_nK: Tensor) -> Tensor:
        """The experts that tokens go to, (n, K) of int64, of those that a router chose for them (`routing.py`)."""
        ...


_CURRENT: ContextVar[LayerPlan | None] = ContextVar("plan", default=None)


@contextmanager
def following(plan: LayerPlan) -> Iterator[None]:
    """Forward passes of this thread follow `plan` within the block."""
    token = _CURRENT.set(plan)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> LayerPlan | None:
    """The plan of this thread's pass; None outside of `following`, where models compute as transformers has them."""
    return _CURRENT.get()
