"""A trainer that takes the time a device would and computes nothing, without torch. Implements `trainer.api.CellTrainer`.

Its weights are one small array, really exposed, read and saved, so that every hand-over between processes is the real one.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qwengyre.core.errors import TrainerError
from qwengyre.core.records import MicroStep
from qwengyre.paced.plan import PacedPlan
from qwengyre.trainer import checkpoint
from qwengyre.trainer.api import Membership
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats
from qwengyre.transfer.api import Exposure, Transport

NUM_WEIGHTS = 256


class PacedTrainer:
    def __init__(self, plan: PacedPlan, transport: Transport):
        self._plan, self._transport = plan, transport
        self.weights = np.zeros(NUM_WEIGHTS, np.float32)
        self.step = -1
        self._free_at = [0.0] * plan.num_replicas
        """When each replica has finished what it computes; a heap."""
        self._exposure: Exposure | None = None

    def connect(self, membership: Membership) -> None:
        """Nothing is summed, so there is nobody to meet: the scheduler keeps the order."""

    def close(self) -> None:
        """As `connect`."""

    def begin_step(self, step: int) -> None:
        self.step = step

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Have a replica take the time that the plan gives a micro-step of this group; return once one is free for the next.

        Raises TrainerError in another step.
        """
        if micro_step.step != self.step:
            raise TrainerError(f"{micro_step.micro_step} belongs to step {micro_step.step}, this trainer is in step {self.step}")
        seconds = self._plan.micro_steps_s[micro_step.executions[0].group]
        heapq.heapreplace(self._free_at, time.monotonic() + seconds)
        _sleep_until(self._free_at[0])
        trajectories = [chosen for execution in micro_step.executions for chosen in execution.trajectories]
        return MicroStepStats(
            micro_step=micro_step.micro_step,
            trajectories=len(trajectories),
            trajectories_clipped=0,
            tokens_trained=sum(execution.num_trainable for execution in micro_step.executions),
            tokens_distinct=micro_step.num_distinct_tokens,
            tokens_flat=sum(chosen.num_tokens for chosen in trajectories),
            loss=0.0,
            entropy=0.0,
            log_ratio=0.0,
            log_ratio_max=0.0,
            tokens_clipped=0,
            tokens_capped=0,
            seconds=seconds,
        )

    def reduce(self, num_members: int) -> None:
        """Wait until every replica is done, as a sum would."""
        _sleep_until(max(self._free_at))

    def apply(self, num_executions: int) -> StepStats:
        applied = num_executions > 0
        if applied:
            time.sleep(self._plan.optimizer_s)
            self.weights += 1
        return StepStats(
            step=self.step,
            applied=applied,
            reason="" if applied else "no executions",
            num_executions=num_executions,
            gradient_norm=1.0,
            clip_scale=1.0,
            learning_rate=0.0,
            update_norm=float(applied),
            seconds=self._plan.optimizer_s,
        )

    def publishable(self) -> dict[str, np.ndarray]:
        """The weights, after the time that a publish takes."""
        time.sleep(self._plan.publish_s)
        return {"weights": self.weights}

    def expose(self, version: int, incarnation: int) -> Exposure:
        if self._exposure is not None:
            self._transport.release(self._exposure)
        self._exposure = self._transport.expose({"weights": self.weights}, version=version, incarnation=incarnation)
        return self._exposure

    def pull(self, snapshot: Exposure) -> None:
        self._transport.read(snapshot, into={"weights": self.weights})

    def offload(self) -> None:
        """Nothing to give back; the engine prices the switch."""

    def restore(self) -> None:
        """As `offload`."""

    def save_weights(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file({"weights": self.weights}, str(path))

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict[str, Any]) -> None:
        """A whole folder or none, as a real checkpoint; `files` are those of no model."""
        beside = directory.with_name(f".{directory.name}.{os.getpid()}")
        beside.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "extra": extra, "weights": float(self.weights[0])}
        (beside / checkpoint.META).write_bytes(msgspec.json.encode(state))
        checkpoint.put_in_place(beside, directory)

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        saved = checkpoint.read_meta(directory)
        self.step = saved["step"]
        self.weights[:] = saved["weights"]
        return saved

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        """Refused: there is no model whose log-probs could be compared."""
        raise TrainerError("a paced trainer cannot audit log-probs: set audit_logprobs = false in [runtime]")


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
