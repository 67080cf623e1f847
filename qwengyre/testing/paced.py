"""A plan for paced engines and trainers in which nothing but the one execution takes time."""

from __future__ import annotations

from typing import Final

from qwengyre.paced.plan import PacedPlan

PLAN: Final = PacedPlan(
    executions_s=[[1.0]],
    micro_steps_s=[0.0],
    optimizer_s=0.0,
    publish_s=0.0,
    to_training_s=0.0,
    to_rollout_s=0.0,
    num_calls=1,
    decode_share=0.5,
)
