"""Call `hooks.reward` and hold it to what a reward is."""

from __future__ import annotations

import math
import numbers

import msgspec

from qwengyre.core.errors import QwenGyreError
from qwengyre.core.records import Outcome
from qwengyre.hooks.load import Hook
from qwengyre.hooks.views import ScoredExecution


def rewarded(hook: Hook, execution: ScoredExecution, outcome: Outcome) -> Outcome:
    """`outcome` with the hook's reward as its score, and what the task said beside it. Raises HookFailed."""
    made = hook(execution)
    return msgspec.structs.replace(outcome, score=number_of(hook, made, f"for {execution.execution}"), task_score=outcome.score)


def number_of(hook: Hook, made: object, where: str) -> float:
    """A finite number of whatever kind, numpy's and torch's scalars included. Raises HookFailed, which names hook, place and value."""
    value = made
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong(hook, f"returned {_shown(made)} {where}: it must return a number")
    if not math.isfinite(number := float(value)):
        raise _wrong(hook, f"returned {number} {where}: it must return a finite number")
    return number


def _wrong(hook: Hook, reason: str) -> QwenGyreError:
    return hook.refused(reason)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
