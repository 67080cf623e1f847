"""One paced run: a workload's draws as a plan, a run file, a folder of tasks, and `qwengyre train` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from qwengyre.config.dump import dump_toml
from qwengyre.core.errors import QwenGyreError
from qwengyre.paced.plan import PacedPlan
from qwengyre.runtime.run_config import RunConfig
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import Pool
from qwengyre.sim.workload import Workload
from qwengyre.testing.tokenizers import write_byte_tokenizer

TASK_TOML: Final = "[agent]\ntimeout_sec = 3600\n[verifier]\ntimeout_sec = 600\n"
TEST_SH: Final = 'echo 0.5 > "$VERIFIER_DIR/reward.txt"\n'
NUM_CALLS: Final = 5
DECODE_SHARE: Final = 0.6
PROGRAM: Final = "from qwengyre.cli.main import main; main()"
LOG_LINES: Final = 25


class PacedSettings(msgspec.Struct, frozen=True):
    """What turns a workload's hours into seconds of real processes."""

    seconds_per_hour: float
    """Compression."""
    lead_s: float
    """What starting and scoring a harness takes on this machine: taken off its time, so that both together last as drawn."""

    def seconds(self, simulated_s: float) -> float:
        return simulated_s * self.seconds_per_hour / 3600


class PacedResult(msgspec.Struct, frozen=True):
    folder: Path
    wall_s: float
    cpu_share: float
    """CPU time of all processes of the run over wall time times the CPUs of this machine."""


def make_plan(workload: Workload, durations: Durations, pool: Pool, settings: PacedSettings) -> PacedPlan:
    """Price the workload's work on cells of `pool`, as `sim.driver` does."""
    hours_GN = durations.unloaded_GN / 3600
    shortest_s = settings.seconds_per_hour * float(hours_GN.min())
    if shortest_s < 4 * settings.lead_s:
        raise QwenGyreError(
            f"the shortest execution lasts {shortest_s:.2f} s, of which starting and scoring a harness takes {settings.lead_s:.2f}: "
            "raise --seconds-per-hour"
        )
    executions_GN = np.maximum(0.0, hours_GN * settings.seconds_per_hour - settings.lead_s)
    num_replicas = pool.num_replicas(workload)
    micro_steps = [durations.micro_steps_s(group, ())[0] * num_replicas / pool.cell_nodes for group in range(len(hours_GN))]
    return PacedPlan(
        executions_s=executions_GN.tolist(),
        micro_steps_s=[settings.seconds(seconds) for seconds in micro_steps],
        num_replicas=num_replicas,
        optimizer_s=settings.seconds(workload.optimizer_s),
        publish_s=settings.seconds(workload.publish_s),
        to_training_s=settings.seconds(workload.to_training_s),
        to_rollout_s=settings.seconds(workload.to_rollout_s),
        num_calls=NUM_CALLS,
        decode_share=DECODE_SHARE,
    )


def run_paced(name: str, scheduler: SchedulerConfig, plan: PacedPlan, folder: Path) -> PacedResult:
    """Run it to the end. Raises QwenGyreError with the last lines that it printed when it fails."""
    folder.mkdir(parents=True)
    _write_inputs(name, scheduler, plan, folder)
    command = [sys.executable, "-c", PROGRAM, "train", str(folder / "run.toml"), "--runs-dir", str(folder / "runs")]
    started = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - started
    if process.returncode:
        tail = (folder / "output.txt").read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise QwenGyreError(f"the paced run of {name} ended with {process.returncode}:\n" + "\n".join(tail))
    (made,) = (folder / "runs").iterdir()
    cpu_s = usage.ru_utime + usage.ru_stime
    return PacedResult(made, wall_s, cpu_s / (wall_s * (os.cpu_count() or 1)))


def _write_inputs(name: str, scheduler: SchedulerConfig, plan: PacedPlan, folder: Path) -> None:
    task = folder / "tasks" / "paced"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text(TASK_TOML)
    (task / "instruction.md").write_text("Do as the model says.\n")
    (task / "tests" / "test.sh").write_text(TEST_SH)
    model = write_byte_tokenizer(folder / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    (folder / "run.toml").write_text(dump_toml(msgspec.convert(_run_file(name, scheduler, folder), RunConfig)))


def _run_file(name: str, scheduler: SchedulerConfig, folder: Path) -> dict[str, Any]:
    decided = {key: value for key, value in msgspec.structs.asdict(scheduler).items() if value is not None}
    slots = max(scheduler.slots_per_cell, scheduler.slots_per_standalone if scheduler.num_standalone else 0)
    return {
        "runtime": {"name": name, "audit_logprobs": False, "max_concurrent_harnesses": 64, "heartbeat_s": 5.0},
        "tasks": {"family": "", "train": str(folder / "tasks")},
        "policy": {"model": str(folder / "model"), "max_tokens_per_call": 64, "max_context_tokens": 4096},
        "evaluation": {"at_start": False, "at_end": False},
        "gateway": {"renderer": {"name": "qwen3", "enable_thinking": False}},
        "harness": {
            "command": ["python3", "-m", "qwengyre.bench.paced_harness", "{instruction_file}"],
            "isolation": "none",
            "warm_start": True,
            "overall_timeout_s": 3600.0,
        },
        "scheduler": decided,
        "engine": {
            "engine": "paced",
            "paced_plan": str(folder / "plan.json"),
            "max_running": slots + 8,
            "max_context_tokens": 4096,
        },
        "trainer": {"checkpoint_every": scheduler.steps_per_burst},
        "trajectory": {"keep_zero_advantage": True, "micro_step_tokens": 0},
    }
