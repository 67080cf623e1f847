"""Whether steps taught the policy anything, and if not, why and what to look at. Pure: from the records of the steps alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from qwengyre.telemetry.records import StepFinished


class Cause(NamedTuple):
    """Why a step taught nothing."""

    holds: Callable[[StepFinished], bool]
    what: str
    look_at: str


CAUSES: Final = (
    Cause(
        lambda step: step.num_dropped > 0 and step.num_scored == 0,
        "no execution of it could be scored",
        "the reasons above and logs/controller.log; try one task by itself: qwengyre run-task",
    ),
    Cause(
        lambda step: step.num_calls == step.tokens_trained == 0,
        "no harness called the model",
        "whether the harness reads OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL; try one task by itself: qwengyre run-task",
    ),
    Cause(
        lambda step: step.num_mixed_groups == 0 and step.reward_mean == step.reward_std == 0,
        "every execution scored 0",
        "what the harness did (qwengyre inspect RUN, workspaces/), whether a solution scores at all (qwengyre tasks check --solve), "
        "and easier tasks or partial scores: a policy that never succeeds has nothing to learn from",
    ),
    Cause(
        lambda step: step.num_mixed_groups == 0 and step.reward_std == 0,
        "every execution scored the same",
        "harder tasks, or tests that give partial scores: what always scores the same teaches nothing",
    ),
    Cause(
        lambda step: step.num_mixed_groups == 0,
        "in every group all executions scored the same",
        "tasks that the policy solves sometimes; more executions of each (scheduler.executions_per_group), a higher "
        "policy.temperature, or tests that give partial scores",
    ),
    Cause(
        lambda step: step.tokens_trained == 0,
        "its executions scored differently, but none of their tokens can be trained",
        "the roles of their calls (qwengyre inspect RUN): side calls are not trained; trajectory.harness_rules tells roles",
    ),
    Cause(
        lambda step: step.clip_fraction == 1,
        "the objective clipped every trajectory",
        "trainer.clip_low and trainer.clip_high, a lower trainer.learning_rate, fewer steps between publishes",
    ),
    Cause(
        lambda step: step.update_norm == 0,
        "its update was not applied",
        "the reason above and logs/controller.log",
    ),
)
"""The first one that holds is told."""


def cause_of(step: StepFinished) -> Cause | None:
    """Why `step` taught the policy nothing; None when it did teach it, or was recorded by a version that did not ask."""
    if step.num_mixed_groups is None:
        return None
    return next((cause for cause in CAUSES if cause.holds(step)), None)


def note_of(step: StepFinished) -> str:
    """What to say as soon as `step` is over, "" when there is nothing to say."""
    cause = cause_of(step)
    return f"step {step.step} taught the policy nothing: {cause.what}. Look at {cause.look_at}" if cause else ""


def note_of_all(steps: Sequence[StepFinished]) -> str:
    """What to say of a run so far, "" when every step taught the policy something."""
    causes = Counter(cause for step in steps if (cause := cause_of(step)) is not None)
    if not causes:
        return ""
    num = causes.total()
    which = (
        "no step taught the policy anything" if num == len(steps) else f"{num} of {len(steps)} steps taught the policy nothing"
    )
    counts = {cause: f" ({count} of them)" if len(causes) > 1 else "" for cause, count in causes.items()}
    return f"{which}: " + "; ".join(f"{cause.what}{counts[cause]}. Look at {cause.look_at}" for cause in causes)
