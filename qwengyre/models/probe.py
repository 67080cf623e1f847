"""The probe: log-probs of a fixed text, published with every snapshot. An engine that does not reproduce them serves nothing.

An update in place can miss a copy that a kernel keeps, a name that a loader skips, a shard of one rank; the engine then answers
plausibly under weights that are not those published. The trainer says what it computes of 32 tokens, and how far rounding alone must be
expected to carry another program from that: it computes them once more with the output of every module rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

PROBE: Final = "qwengyre.probe"
"""Name of its bytes beside the weights of a snapshot, and in the metadata of a file of weights."""
NUM_TOKENS: Final = 32
"""Whose log-probs are compared; one more stands before them."""
UNITS: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
"""Largest relative error of one rounding (unit roundoff)."""
FACTOR: Final = 4.0
"""More than the rounded forward tells: engines round in other places, and weights too. Of tiny models in float32 and bfloat16 a fortieth
and an eighth of the bound were seen; what was left under old weights is off by many times the bound."""
MOST_NATS: Final = 1e3
"""A published log-prob below minus this is of ruined weights (a step that was far too long): logits are then so far apart that the last bit
of a sum decides which token has all, and two programs may differ by as much as there is. Sane models stay above -100."""


def text(vocabulary: int) -> np.ndarray:
    """int64 (NUM_TOKENS + 1,): arbitrary, small, since a model's special tokens and its padding stand at the end of the vocabulary.

    >>> text(100)[:4].tolist(), len(text(100)), int(text(5).max())
    ([3, 10, 31, 66], 33, 4)
    """
    index = np.arange(NUM_TOKENS + 1)
    return (7 * index * index % 89 + 3) % vocabulary


class Probe(msgspec.Struct, frozen=True):
    """What the publisher computes of `text`, or of its beginning when the model's texts end before."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens from the second on, at temperature 1."""
    sensitivity: float
    """Root mean square of the change in nats, for each relative error of 1 at the output of every module."""
    longest_sum: int
    """Products that a matrix adds up at most: they are added in float32, whose errors grow with the root of their number."""
    unit: float
    """Unit roundoff of the publisher's own numbers."""

    def bound(self, dtype: str) -> float:
        """Root mean square gap in nats that rounding may make for an engine that computes in `dtype`."""
        sums = math.sqrt(self.longest_sum) * UNITS["float32"]
        unit = math.hypot(UNITS[dtype], sums, self.unit)
        return FACTOR * unit * (self.sensitivity + max(abs(logprob) for logprob in self.logprobs))

    def gap(self, found: Sequence[float]) -> float:
        """Root mean square of the differences to `found`, the first of these log-probs; NaN when one of them is."""
        own = np.array(self.logprobs[: len(found)])
        return float(np.sqrt(np.mean((own - np.asarray(found, np.float64)) ** 2)))

    @property
    def is_telling(self) -> bool:
        """Whether two programs with these weights can be expected to agree at all."""
        return all(logprob > -MOST_NATS for logprob in self.logprobs)

    def refusal(self, found: Sequence[float], dtype: str) -> str:
        """Why an engine that computes `found` does not compute with these weights; "" when it does, or when nobody could tell."""
        if not self.is_telling:
            return ""
        gap, bound = self.gap(found), self.bound(dtype)
        if gap <= bound:
            return ""
        return (
            f"its log-probs of {len(found)} tokens are {gap:.3g} nats (root mean square) away from those published with the weights;"
            f" rounding in {dtype} makes {bound:.2g} at most"
        )

    def packed(self) -> np.ndarray:
        """uint8, to lie beside weights."""
        return np.frombuffer(msgspec.msgpack.encode(self), np.uint8)


def probe_in(arrays: Mapping[str, np.ndarray]) -> Probe | None:
    """The probe that was published with these weights; None: there is none."""
    packed = arrays.get(PROBE)
    return None if packed is None else msgspec.msgpack.decode(packed.tobytes(), type=Probe)
