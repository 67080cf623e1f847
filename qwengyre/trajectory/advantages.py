"""Group-relative advantages over executions, never over rows: how often an execution branched must not weigh it."""

from __future__ import annotations

from collections.abc import Sequence

from qwengyre.core.records import Outcome, Validity


def counts(outcome: Outcome) -> bool:
    """Whether an execution is in the baseline and in E: scored, or nothing to score; not dropped."""
    return outcome.validity is not Validity.DROPPED


def group_advantages(outcomes: Sequence[Outcome], *, divide_by_std: bool = False) -> list[float | None]:
    """Advantage of each execution of one group: its reward minus the mean of those that count; None for the dropped.

    With `divide_by_std`, divided by the population standard deviation (GRPO, arXiv 2402.03300, section 4.1.2). Fewer than two that count,
    or equal rewards, give 0.
    """
    rewards = [outcome.score for outcome in outcomes if counts(outcome)]
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0 if counts(outcome) else None for outcome in outcomes]
    mean = sum(rewards) / len(rewards)
    scale = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5 if divide_by_std else 1.0
    return [(outcome.score - mean) / scale if counts(outcome) else None for outcome in outcomes]
