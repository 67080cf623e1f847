"""QwenGyre: reinforcement learning for long-horizon agents in harnesses that nobody can change.

The names below are what to build on from Python (docs/from-python.md). Each is imported when it is first used, so that
`import qwengyre` stays fast and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from qwengyre.engines.api import CellEngine, Serving
    from qwengyre.hooks.callbacks import ExecutionOver, RunCallbacks, WeightsPublished
    from qwengyre.hooks.task_source import GroupResult, TaskProgress, TaskSource
    from qwengyre.hooks.views import (
        Advantage,
        EndedExecution,
        EndedGroup,
        GroupFilter,
        PathChoice,
        PathsToChoose,
        Reward,
        ScoredExecution,
        Transcript,
        TranscriptCall,
    )
    from qwengyre.hooks.workspace import LeftWorkspace
    from qwengyre.runtime.check import check_run
    from qwengyre.runtime.run_config import RunConfig, load_run
    from qwengyre.runtime.train import train
    from qwengyre.scheduler.config import SchedulerConfig
    from qwengyre.scheduler.scheduler import Scheduler
    from qwengyre.sim.planner import plan
    from qwengyre.sim.results import Drawn, Inline, simulate
    from qwengyre.sim.settings import Setting
    from qwengyre.sim.workload import Workload, builtin_workloads, load_workload
    from qwengyre.telemetry.folder import RunFolder
    from qwengyre.telemetry.records import EvaluationFinished, RunEnded, StepFinished
    from qwengyre.trainer.api import CellTrainer
    from qwengyre.trainer.config import TrainerConfig
    from qwengyre.trainer.objectives import OBJECTIVES, TokenBatch, TokenLoss
    from qwengyre.trajectory.paths import CandidatePath
    from qwengyre.trajectory.process import process_group
    from qwengyre.trajectory.sampling import sample_trajectories
    from qwengyre.trajectory.tree import TrajectoryTree
    from qwengyre.transfer.api import Transport

__version__ = "0.1.0"

__all__ = [
    "OBJECTIVES",
    "Advantage",
    "CandidatePath",
    "CellEngine",
    "CellTrainer",
    "Drawn",
    "EndedExecution",
    "EndedGroup",
    "EvaluationFinished",
    "ExecutionOver",
    "GroupFilter",
    "GroupResult",
    "Inline",
    "LeftWorkspace",
    "PathChoice",
    "PathsToChoose",
    "RecordedRun",
    "Reward",
    "RunCallbacks",
    "RunConfig",
    "RunEnded",
    "RunFolder",
    "Scheduler",
    "SchedulerConfig",
    "ScoredExecution",
    "Serving",
    "Setting",
    "StepFinished",
    "TaskProgress",
    "TaskSource",
    "TokenBatch",
    "TokenLoss",
    "TrainerConfig",
    "TrajectoryTree",
    "Transcript",
    "TranscriptCall",
    "Transport",
    "WeightsPublished",
    "Workload",
    "builtin_workloads",
    "check_run",
    "load_run",
    "load_workload",
    "plan",
    "process_group",
    "sample_trajectories",
    "simulate",
    "train",
]

_PLACES: Final = {
    "telemetry.records": ("EvaluationFinished", "RunEnded", "StepFinished"),
    "hooks.task_source": ("GroupResult", "TaskProgress", "TaskSource"),
    "hooks.callbacks": ("ExecutionOver", "RunCallbacks", "WeightsPublished"),
    "trajectory.paths": ("CandidatePath",),
    "trainer.config": ("TrainerConfig",),
    "hooks.workspace": ("LeftWorkspace",),
    "hooks.views": (
        "Advantage",
        "PathChoice",
        "EndedExecution",
        "EndedGroup",
        "GroupFilter",
        "PathsToChoose",
        "Reward",
        "TranscriptCall",
        "ScoredExecution",
        "Transcript",
    ),
    "engines.api": ("CellEngine", "Serving"),
    "recorded.run": ("RecordedRun",),
    "runtime.check": ("check_run",),
    "runtime.run_config": ("RunConfig", "load_run"),
    "runtime.train": ("train",),
    "scheduler.config": ("SchedulerConfig",),
    "scheduler.scheduler": ("Scheduler",),
    "sim.planner": ("plan",),
    "sim.results": ("Drawn", "Inline", "simulate"),
    "sim.settings": ("Setting",),
    "sim.workload": ("Workload", "builtin_workloads", "load_workload"),
    "telemetry.folder": ("RunFolder",),
    "trainer.api": ("CellTrainer",),
    "trainer.objectives": ("OBJECTIVES", "TokenBatch", "TokenLoss"),
    "trajectory.process": ("process_group",),
    "trajectory.sampling": ("sample_trajectories",),
    "trajectory.tree": ("TrajectoryTree",),
    "transfer.api": ("Transport",),
}
_MODULE_OF: Final = {name: f"qwengyre.{place}" for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'qwengyre' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
