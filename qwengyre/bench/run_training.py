"""`qwengyre bench run-training RUN`: what a run trained, once more, with shared prefixes computed once and with each path by itself.

Same trainer, same objective, the weights of the run's last checkpoint: only the layout differs, so the summed gradients must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from qwengyre.bench.measure import measure
from qwengyre.bench.output import say
from qwengyre.bench.transports import open_bench_transport
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import MicroStepId
from qwengyre.core.records import MicroStep
from qwengyre.journal import read
from qwengyre.runtime.steps import latest_checkpoint
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.flat import NUM_COUNTERS
from qwengyre.trainer.trainer import Trainer


class RunTraining(msgspec.Struct, frozen=True):
    micro_steps: int
    path_tokens: int
    """Of all paths, each counted by itself."""
    distinct_tokens: int
    trees_s: float
    """CPU seconds."""
    paths_s: float
    ratio: float
    """`trees_s` / `paths_s`."""
    max_grad_gap: float
    """Relative L2 between the two summed gradients."""


def run_training(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)],
    json_target: JsonTarget = None,
    most: Annotated[int, typer.Option(min=1, help="Micro-steps to compute; the last ones of the run.")] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, interleaved; the fastest counts.")] = 3,
) -> None:
    """Train on a run's own trees once more, shared and flattened: CPU time and gradients."""
    torch.set_num_threads(1)
    folder = RunFolder.open(run)
    trees = [msgspec.structs.replace(record, step=0) for _, record in read(folder.trained_journal, MicroStep)][-most:]
    if not trees:
        raise ConfigError("this run has trained nothing yet", file=str(folder.trained_journal))
    _, checkpoint = latest_checkpoint(folder.checkpoints)
    paths = [path for tree in trees for path in flattened(tree)]
    config = RecordedConfig(folder.config).table("trainer", TrainerConfig)
    transport = open_bench_transport("shm", "qwengyre-bench-training")  # nothing is exposed
    trainers = {name: Trainer(checkpoint, config, transport) for name in ("trees", "paths")}
    seconds: dict[str, list[float]] = {"trees": [], "paths": []}
    for _ in range(repeats):
        for name, work in (("trees", trees), ("paths", paths)):
            seconds[name].append(measure(partial(_compute, trainers[name], work)).cpu_s)
    by_trees, by_paths = (trainers[name].flat_gradient()[:-NUM_COUNTERS] for name in ("trees", "paths"))
    found = RunTraining(
        micro_steps=len(trees),
        path_tokens=sum(path.num_distinct_tokens for path in paths),
        distinct_tokens=sum(tree.num_distinct_tokens for tree in trees),
        trees_s=min(seconds["trees"]),
        paths_s=min(seconds["paths"]),
        ratio=min(seconds["trees"]) / min(seconds["paths"]),
        max_grad_gap=float(torch.linalg.norm(by_trees - by_paths) / torch.linalg.norm(by_paths)),
    )
    say(
        f"{found.micro_steps} micro-steps, {found.path_tokens} tokens of paths, {found.distinct_tokens} distinct:"
        f" {found.trees_s:.2f} s against {found.paths_s:.2f} s flattened, ratio {found.ratio:.3f},"
        f" gradients {found.max_grad_gap:.1e} apart"
    )
    write_json(json_target, found)


def flattened(micro_step: MicroStep) -> Iterator[MicroStep]:
    """Every path of `micro_step` as a micro-step of its own; what an earlier path trains stays masked in later ones."""
    for execution in micro_step.executions:
        for index, trajectory in enumerate(execution.trajectories):
            alone = msgspec.structs.replace(execution, trajectories=(trajectory,))
            name = MicroStepId(f"{micro_step.micro_step}/{execution.execution}/{index}")
            yield MicroStep(name, micro_step.step, (alone,), trajectory.num_tokens)


def _compute(trainer: Trainer, micro_steps: Sequence[MicroStep]) -> None:
    trainer.begin_step(0)
    for micro_step in micro_steps:
        trainer.compute(micro_step)
