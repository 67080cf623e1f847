"""The `[tracking]` table of a run file: where else the curves of a run go."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Trackers read the run folder, each in a process of its own (docs/tracking.md)."""

    to: tuple[TrackerName, ...] = ()
    """Trackers that get curves, configuration, summary and tables of executions. The curves alone are in `tensorboard/` of every run."""
    project: str = "qwengyre"
    """Project (wandb, trackio) or experiment (mlflow) that the run goes into."""
    mlflow_uri: str = ""
    """Where MLflow keeps runs: http://..., sqlite:///FILE. Unset: MLFLOW_TRACKING_URI, else a file of the run folder."""
    executions: bool = True
    """Send a table of the executions that each step trained on: task, reward, end, tokens, time."""
    samples: int = 0
    """Conversations of each step that go along as text. They leave this machine when the tracker does."""
    checkpoints: bool = False
    """Send each checkpoint as an artifact, weights and all (wandb, mlflow)."""
    prometheus: str = ""
    """`host:port` where the newest numbers can be scraped as Prometheus text, for as long as the run lasts."""
    every_s: float = 5.0
    """How often a tracker looks for what is new."""
    finish_s: float = 30.0
    """Longest that the end of a run waits for a tracker; then it is ended, and what is left is named."""

    def __post_init__(self) -> None:
        for key in ("every_s", "finish_s"):
            if not (math.isfinite(value := getattr(self, key)) and value > 0):
                raise ValueError(f"{key} must be above 0, not {value}")
        if self.samples < 0:
            raise ValueError(f"samples must not be negative, not {self.samples}")
        if len(set(self.to)) < len(self.to):
            raise ValueError("to has a tracker twice: name each once")
        if self.prometheus:
            host, _, port = self.prometheus.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"prometheus must be host:port, such as 127.0.0.1:9400, not {self.prometheus!r}")
