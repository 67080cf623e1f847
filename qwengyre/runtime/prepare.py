"""What must exist before anything is started: tasks, the policy to start from, the plan of evaluations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.core.errors import ConfigError
from qwengyre.runtime.queries import EvaluationPlan, TrainingOrder
from qwengyre.sandbox.task import Task, load_tasks
from qwengyre.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from qwengyre.config.run import RunConfig


class Prepared(msgspec.Struct, frozen=True):
    """Inputs of a run, checked."""

    tasks: dict[str, Task]
    order: TrainingOrder
    evaluation: EvaluationPlan
    scheduler: SchedulerConfig
    model_dir: Path


def prepare(config: RunConfig, progress: Callable[[str], None]) -> Prepared:
    """Load or generate tasks, load or warm up the policy. Raises ConfigError for what a user must mend."""
    _refuse_what_is_decided_elsewhere(config)
    read_harness_rules(config.trajectory.harness_rules)  # a mistake in it is told before anything starts
    train, held_out = _tasks(config)
    order = TrainingOrder([task.name for task in train], config.runtime.seed)
    evaluation = EvaluationPlan(
        tasks=tuple(task.name for task in held_out),
        samples=config.evaluation.samples,
        greedy=config.evaluation.greedy,
        temperature=config.policy.temperature,
    )
    wants = config.evaluation.at_start or config.evaluation.at_end or config.evaluation.every_steps > 0
    if wants and not held_out:
        raise ConfigError(
            "there are no held-out tasks to evaluate on: set it, or switch [evaluation] at_start and at_end off",
            key="tasks.held_out",
        )
    scheduler = msgspec.structs.replace(
        config.scheduler,
        evaluation_every_steps=config.evaluation.every_steps,
        evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end,
        evaluation_group_sizes=evaluation.group_sizes() if wants else (),
    )
    tasks = {task.name: task for task in (*train, *held_out)}
    return Prepared(tasks, order, evaluation, scheduler, _model_dir(config, progress))


def _refuse_what_is_decided_elsewhere(config: RunConfig) -> None:
    """The scheduler's own keys of an evaluation follow from the held-out tasks and from [evaluation]."""
    given, default = config.scheduler, SchedulerConfig()
    for name in ("evaluation_every_steps", "evaluate_at_start", "evaluate_at_end", "evaluation_group_sizes"):
        if getattr(given, name) != getattr(default, name):
            raise ConfigError("a run takes this from its [evaluation] table: set it there", key=f"scheduler.{name}")


def _tasks(config: RunConfig) -> tuple[list[Task], list[Task]]:
    wanted = config.tasks
    if not wanted.family:
        train = load_tasks(Path(wanted.train))
        held_out = load_tasks(Path(wanted.held_out)) if wanted.held_out else []
    else:
        folder = _generate_family(config)
        train, held_out = load_tasks(folder / "train"), load_tasks(folder / "held-out")
    shared = {task.name for task in train} & {task.name for task in held_out}
    if shared:
        raise ConfigError(f"{min(shared)} is in both tasks.train and tasks.held_out", key="tasks.held_out")
    return train, held_out


def _generate_family(config: RunConfig) -> Path:
    from qwengyre.sandbox.families.mini_repositories import generate

    wanted, seed = config.tasks, config.runtime.seed
    name = f"{wanted.family}-{seed}-{wanted.num_train}-{wanted.num_held_out}"
    folder = Path(config.policy.cache).resolve() / "tasks" / name
    with _made_once(folder) as temporary:
        if temporary is not None:
            generate(temporary, seed, wanted.num_train, wanted.num_held_out)
    return folder


@contextlib.contextmanager
def _made_once(folder: Path) -> Iterator[Path | None]:
    """Yield a folder to fill that becomes `folder` in one piece, or None if it is there already."""
    if folder.exists():
        yield None
        return
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    yield temporary
    temporary.rename(folder)


def _model_dir(config: RunConfig, progress: Callable[[str], None]) -> Path:
    if not config.policy.model:
        from qwengyre.warmup import warm_up

        return warm_up(config.warmup, Path(config.policy.cache), config.runtime.seed, progress)
    folder = Path(config.policy.model)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: it must be the folder of a Hugging Face model", key="policy.model")
    return folder
