"""What a figure of a run should be like: a sentence beside it, and, where a number alone can tell, whether it is good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from qwengyre.telemetry.summary import Summary

EXACT_GAP: Final = 1e-4
"""What engine and trainer may differ by in float32 (docs/engines.md)."""
COARSE_GAP: Final = 0.2
"""And in bfloat16."""
MOST_CLIPPED: Final = 0.5
LITTLE_IDLE: Final = 0.3


class Hint(NamedTuple):
    text: str
    is_good: Callable[[Summary], bool | None] = lambda summary: None
    """None when the number alone does not tell."""

    def verdict(self, summary: Summary) -> str:
        """One or three words, or none."""
        good = self.is_good(summary)
        return "" if good is None else "good" if good else "look at this"

    def beside(self, summary: Summary) -> str:
        """The sentence, with the verdict before it when there is one."""
        return ": ".join(filter(None, (self.verdict(summary), self.text)))


def _gap_is_good(summary: Summary) -> bool | None:
    gap = summary.max_logprob_gap
    if gap is None or EXACT_GAP < gap <= COARSE_GAP:
        return None
    return gap <= EXACT_GAP


OUTCOME: Final[dict[str, Hint]] = {
    "held-out score": Hint("higher is better; compare a gain with the scatter between seeds before you believe it"),
    "steps": Hint("each should teach something", lambda s: s.steps_that_taught_nothing == 0 if s.steps else None),
    "executions": Hint("none should be lost; one that is costs time only, for it is run again", lambda s: s.executions_lost == 0),
    "calls moved in mid-generation": Hint(
        "the fewer tokens computed again, the better; 0 means that the KV of every call came along",
        lambda s: s.tokens_recomputed_after_move == 0 if s.calls_moved else None,
    ),
    "tokens recomputed at publishes": Hint("fewer is better: it costs time, and changes no result"),
    "timeouts with a partial score": Hint("few is good; if there are many, raise harness.timeout_s"),
    "staleness": Hint("0 is best for learning, more keeps cells busy; scheduler.max_staleness bounds it"),
    "clip fraction": Hint(
        f"share of the trajectories that taught nothing because the policy had moved away; above {MOST_CLIPPED:g} most do not: "
        "lower trainer.learning_rate, widen trainer.clip_low and clip_high",
        lambda s: s.clip_fraction <= MOST_CLIPPED if s.steps else None,
    ),
    "largest log-prob gap": Hint(
        f"at most {EXACT_GAP:g} in float32 and {COARSE_GAP:g} in bfloat16; beyond, engine and trainer compute different things",
        _gap_is_good,
    ),
    "idle share of cells": Hint(
        "lower is better. Cells are idle while harnesses work: raise scheduler.slots_per_cell or groups_per_step, or take fewer cells. On a "
        "machine that harnesses and cells share much of it is usual",
        lambda s: True if s.steps and s.idle_share <= LITTLE_IDLE else None,
    ),
}
"""By the name of the figure in the outcome of a run. What is not here is neither good nor bad."""
_UNJUDGED: Final = Hint("")


def hint_of(name: str) -> Hint:
    """The hint of a figure in the outcome of a run; an empty one where there is nothing to say."""
    return OUTCOME.get(name, _UNJUDGED)


HEALTH: Final[dict[str, str]] = {
    "Staleness, steps": "0: dispatched by the newest policy. Steady and low is good.",
    "Token staleness, steps": "As staleness, for the policy that sampled each token. Steady and low is good.",
    "Clip fraction": f"Low and steady is good; above {MOST_CLIPPED:g} most trajectories teach nothing.",
    "Largest log-ratio": "x: the policy has made one token e^x times as likely since it was sampled. Below 1 is good; growing from step to "
    "step is not: lower trainer.learning_rate.",
    "Gradient norm": "Steady is good. A peak of many times its neighbours is one odd step; trainer.max_gradient_norm clips it.",
    "Update norm": "Steady is good; 0: the step was not applied.",
    "Entropy, nats": "A slow fall is good. Near 0 early: the policy no longer tries anything else.",
    "Tokens of paths, by distinct token": "How often the tree saves computing a token again. 1: nothing is shared; the higher, the cheaper.",
    "Seconds a step": "Lower is better; steady is good.",
    "Tokens generated / s": "Higher is better; it falls while cells train.",
    "Memory, GB": "Level is good; a steady rise is not.",
}
"""By the title of the chart."""
