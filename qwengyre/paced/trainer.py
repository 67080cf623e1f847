"""A trainer that takes the time a device would and computes nothing. Same methods as `trainer.Trainer`, no torch.

Its weights are one small array, really exposed, read and saved, so that every hand-over between processes is the real one.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from qwengyre.core.errors import TrainerError
from qwengyre.core.records import MicroStep
from qwengyre.paced.plan import PacedPlan
from qwengyre.trainer import checkpoint
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats
from qwengyre.transfer.api import Carrier, Exposure

NUM_WEIGHTS = 256


class PacedTrainer:
    def __init__(self, plan: PacedPlan, carrier: Carrier):
        self._plan, self._carrier = plan, carrier
        self.weights = np.zeros(NUM_WEIGHTS, np.float32)
        self.step = -1
        self._computed: list[str] = []
        self._free_at = [0.0] * plan.num_replicas
        """When each replica has finished what it computes; a heap."""
        self._exposure: Exposure | None = None

    def begin_step(self, step: int) -> None:
        self.step, self._computed = step, []

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Have a replica take the time that the plan gives a micro-step of this group; return once one is free for the next.

        Raises TrainerError in another step.
        """
        if micro_step.step != self.step:
            raise TrainerError(f"{micro_step.micro_step} belongs to step {micro_step.step}, this trainer is in step {self.step}")
        seconds = self._plan.micro_steps_s[micro_step.executions[0].group]
        heapq.heapreplace(self._free_at, time.monotonic() + seconds)
        _sleep_until(self._free_at[0])
        self._computed.append(micro_step.micro_step)
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

    def flat_gradient(self) -> np.ndarray:
        """The number of micro-steps computed, once every replica is done: the one sum that the members hand over."""
        _sleep_until(max(self._free_at))
        return np.array([len(self._computed)], np.float32)

    def apply(self, num_executions: int, summed: np.ndarray | None = None) -> StepStats:
        time.sleep(self._plan.optimizer_s)
        self.weights += 1
        return StepStats(self.step, True, "", num_executions, 1.0, 1.0, 0.0, 1.0, self._plan.optimizer_s)

    def arrays_to_publish(self) -> dict[str, np.ndarray]:
        """The weights, after the time that a publish takes."""
        time.sleep(self._plan.publish_s)
        return {"weights": self.weights}

    def expose(self, version: int, epoch: int = 0) -> Exposure:
        if self._exposure is not None:
            self._carrier.release(self._exposure)
        self._exposure = self._carrier.expose({"weights": self.weights}, version=version, epoch=epoch)
        return self._exposure

    def pull(self, exposure: Exposure) -> None:
        self._carrier.read(exposure, into={"weights": self.weights})

    def offload(self) -> None:
        """Nothing to give back; the engine prices the switch."""

    def restore(self) -> None:
        """As `offload`."""

    def save_weights(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file({"weights": self.weights}, str(path))

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict | None = None) -> None:
        """A whole folder or none, as a real checkpoint; `files` are those of no model."""
        beside = directory.with_name(f".{directory.name}.{os.getpid()}")
        beside.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "extra": extra or {}, "weights": float(self.weights[0])}
        (beside / checkpoint.META).write_bytes(msgspec.json.encode(state))
        checkpoint.put_in_place(beside, directory)

    def load_checkpoint(self, directory: Path) -> dict:
        saved = checkpoint.read_meta(directory)
        self.step = saved["step"]
        self.weights[:] = saved["weights"]
        return saved

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        """Refused: there is no model whose log-probs could be compared."""
        raise TrainerError("a paced trainer cannot audit log-probs: set audit_logprobs = false in [runtime]")


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


class PacedMembers:
    """The members of a step without a communicator: the scheduler's order is kept, and nothing is summed."""

    @classmethod
    def connect(cls, rank: int, world: int, store_address: str, epoch: int, timeout_s: float) -> PacedMembers:
        return cls()

    def reduce(self, gradient: np.ndarray, num_members: int) -> np.ndarray:
        return gradient

    def close(self) -> None:
        """Nothing is open."""
