"""The lines of metrics.jsonl: what the report, the dashboard and TensorBoard are made of.

`at` is seconds on the run's clock, which continues where it stopped when a run is resumed. A step that is done again after a
kill is written again; the later line counts.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

Number = float | None
"""A number that need not be finite: JSON has no nan, so what is not finite is written and read as null."""
FINISHED: Final = "finished"
"""Why a run ended that was led to its end."""
CellRole = Literal["rollout", "draining", "to_training", "training", "to_rollout", "lost"]


class Metric(msgspec.Struct, frozen=True, tag=True):
    at: float
    """Seconds since the run began, pauses between a kill and a resume left out."""


class RunBegan(Metric, frozen=True, tag=True):
    """The first line, and one more at every resume."""

    name: str
    policy: str
    """elastic, colocate or async."""
    num_cells: int
    num_steps: int
    resumed: bool = False
    executions_kept: int = 0
    """At a resume: finished executions that are not run again."""
    executions_redispatched: int = 0
    """At a resume: live executions whose harness died with the controller."""


class RolesChanged(Metric, frozen=True, tag=True):
    cell: int
    role: CellRole


class WaterlevelSampled(Metric, frozen=True, tag=True):
    """Whenever either number changes."""

    waterlevel: int
    """Executions dispatched and not finished."""
    capacity: int
    """Executions that the cells now in rollout can serve at once."""


class RatesSampled(Metric, frozen=True, tag=True):
    """Every few seconds."""

    tokens_generated_per_s: float
    tokens_trained_per_s: float
    memory_gb: float
    """PSS summed over all processes of the run."""


class StepFinished(Metric, frozen=True, tag=True):
    """One optimizer update."""

    step: int
    """Counted from 1: after it the weights are version `step`."""
    reward_mean: float
    """Over the valid executions of the step."""
    reward_std: float
    num_groups: int
    num_executions: int
    members: tuple[int, ...]
    """Cells that trained in this step, core first."""
    joins_mid_step: int
    """Satellites that joined after the step's first micro-step had been claimed."""
    tokens_trained: int
    tokens_distinct: int
    loss: Number
    entropy: Number
    """Mean over trained tokens, nats."""
    gradient_norm: Number
    clip_fraction: float
    """Share of the trajectories whose gradient the objective clipped away."""
    log_ratio_mean: Number
    """Mean of logp_theta - behavior logp over trained tokens."""
    log_ratio_max: Number
    staleness_mean: float
    """Steps between dispatch and training, mean over the groups."""
    staleness_max: int
    token_staleness_mean: float
    """Steps between the version that sampled a token and training, mean over trained tokens."""
    seconds: float
    num_trajectories: int = 0
    """That the objective saw: what `clip_fraction` is a share of."""
    token_clip_fraction: Number = None
    """Share of the trained tokens that the objective clipped, whole trajectories or single tokens."""
    token_cap_fraction: Number = None
    """Share of the trained tokens whose importance weight met the cap."""
    deduplication: Number = None
    """Tokens of the trained paths over `tokens_distinct`: how often the tree saves computing a token again."""
    clip_scale: Number = None
    """What clipping to `trainer.max_gradient_norm` multiplied the gradient by; 1.0 when it was inside."""
    learning_rate: Number = None
    update_norm: Number = None
    """L2 of what the step changed in the weights; 0 when nothing was applied."""
    num_mixed_groups: int | None = None
    """Groups whose executions did not all score the same: the others have nothing to learn from. None in old records."""
    num_scored: int = 0
    """Executions that were scored, 0 included."""
    num_dropped: int = 0
    """Executions that count nowhere: they ran into the overall timeout, or could not be scored."""
    num_calls: int = 0
    """Model calls of the step's executions."""


class PlanAdopted(Metric, frozen=True, tag=True):
    """With `scheduler.tune`: what the scheduler decides by from the next publish on."""

    steps_per_burst: int
    dispatch_depth: float
    two_way: bool
    backlog: float
    reason: str
    order: str = "dispatch"


class EvaluationFinished(Metric, frozen=True, tag=True):
    """Held-out tasks under one version."""

    version: int
    score: float
    """Mean at the training temperature."""
    greedy: float
    """Mean at temperature 0."""
    num_tasks: int
    num_executions: int


class CountsSampled(Metric, frozen=True, tag=True):
    """Cumulative counts of the run, at every step."""

    counts: dict[str, int]
    """calls_moved, compactions, sub_agents, timeouts_scored, switches_to_training ...: fields of `Summary`."""


class AuditFinished(Metric, frozen=True, tag=True):
    """Engine log-probs against a trainer forward under each span's own version."""

    max_logprob_gap: float
    num_tokens: int


class RunEnded(Metric, frozen=True, tag=True):
    """The run is over, or was stopped: then it may be resumed."""

    reason: str
    """`FINISHED`, stopped, or what failed."""


MetricRecord = (
    RunBegan
    | RolesChanged
    | WaterlevelSampled
    | RatesSampled
    | StepFinished
    | PlanAdopted
    | EvaluationFinished
    | CountsSampled
    | AuditFinished
    | RunEnded
)


def scalars(record: MetricRecord) -> tuple[int | None, dict[str, float]]:
    """The step (None: use `at`) and the named finite numbers of a record, for curves.

    >>> scalars(EvaluationFinished(at=3.0, version=4, score=0.5, greedy=0.6, num_tasks=20, num_executions=80))
    (4, {'evaluation/score': 0.5, 'evaluation/greedy': 0.6})
    """
    chosen = CURVES.get(type(record))
    if chosen is None:
        return None, {}
    prefix, step_field, fields = chosen
    step = getattr(record, step_field) if step_field else None
    values = {f"{prefix}/{field}": getattr(record, field) for field in fields}
    return step, {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


CURVES: Final[dict[type, tuple[str, str, tuple[str, ...]]]] = {
    StepFinished: (
        "train",
        "step",
        (
            "reward_mean",
            "reward_std",
            "loss",
            "entropy",
            "gradient_norm",
            "clip_scale",
            "learning_rate",
            "update_norm",
            "clip_fraction",
            "token_clip_fraction",
            "token_cap_fraction",
            "log_ratio_mean",
            "log_ratio_max",
            "staleness_mean",
            "token_staleness_mean",
            "tokens_trained",
            "deduplication",
            "joins_mid_step",
            "num_mixed_groups",
            "seconds",
        ),
    ),
    EvaluationFinished: ("evaluation", "version", ("score", "greedy")),
    WaterlevelSampled: ("scheduler", "", ("waterlevel", "capacity")),
    RatesSampled: ("rates", "", ("tokens_generated_per_s", "tokens_trained_per_s", "memory_gb")),
}
"""Record type -> prefix of its curves, field that counts the steps ("" : seconds of the run), fields to draw."""
