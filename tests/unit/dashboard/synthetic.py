"""Records of a small made-up run."""

from __future__ import annotations

from qwengyre.telemetry.records import (
    AuditFinished,
    EvaluationFinished,
    MetricRecord,
    RatesSampled,
    RolesChanged,
    RunBegan,
    RunEnded,
    StepFinished,
    WaterlevelSampled,
)


def step(number: int, at: float, reward: float = 0.5) -> StepFinished:
    return StepFinished(
        at=at,
        step=number,
        reward_mean=reward,
        reward_std=0.3,
        num_groups=5,
        num_executions=40,
        members=(0, 1),
        joins_mid_step=1,
        tokens_trained=14000,
        tokens_distinct=15000,
        loss=0.01,
        entropy=0.6,
        gradient_norm=0.5,
        clip_fraction=0.1,
        log_ratio_mean=0.0,
        log_ratio_max=0.2,
        staleness_mean=1.0,
        staleness_max=2,
        token_staleness_mean=0.4,
        seconds=2.5,
    )


def evaluation(version: int, at: float, score: float) -> EvaluationFinished:
    return EvaluationFinished(at=at, version=version, score=score, greedy=score + 0.1, num_tasks=20, num_executions=80)


def small_run(policy: str = "elastic", gain: float = 0.4) -> list[MetricRecord]:
    return [
        RunBegan(0.0, "quick <b>", policy, 2, 3),
        RolesChanged(0.0, 0, "rollout"),
        RolesChanged(0.0, 1, "rollout"),
        WaterlevelSampled(0.0, 20, 16),
        evaluation(0, 5.0, 0.25),
        RolesChanged(8.0, 0, "to_training"),
        WaterlevelSampled(8.0, 8, 8),
        RolesChanged(9.0, 0, "training"),
        RatesSampled(9.5, 2500.0, 0.0, 2.1),
        step(1, 12.0, 0.3),
        step(2, 14.0, 0.4),
        RolesChanged(14.0, 0, "to_rollout"),
        RolesChanged(15.0, 0, "rollout"),
        RolesChanged(16.0, 1, "lost"),
        step(3, 18.0, 0.6),
        evaluation(3, 20.0, 0.25 + gain),
        AuditFinished(20.0, 4e-6, 1000),
        RunEnded(20.0, "finished"),
    ]
