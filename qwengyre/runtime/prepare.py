"""What must exist before anything is started: tasks, the policy to start from, the plan of evaluations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.hooks.loaded import NO_HOOKS, LoadedHooks, load_hooks
from qwengyre.runtime.config import TasksConfig
from qwengyre.runtime.queries import EvaluationPlan, TrainingOrder
from qwengyre.sandbox.preflight import check_on_images
from qwengyre.sandbox.task import Task, load_tasks
from qwengyre.sandbox.task_images import run_on_images
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trainer.checkpoint import copy_model_files

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig


class Prepared(msgspec.Struct, frozen=True):
    """Inputs of a run, checked."""

    tasks: dict[str, Task]
    order: TrainingOrder
    evaluation: EvaluationPlan
    scheduler: SchedulerConfig
    model_dir: Path
    hooks: LoadedHooks = NO_HOOKS


def prepare(config: RunConfig, progress: Callable[[str], None]) -> Prepared:
    """Load or generate tasks, find or warm up the policy, of a config that `check_run` found nothing wrong with."""
    train, held_out = _tasks(config)
    if config.sandbox.kind == "own":
        train, held_out = (run_on_images(tasks, config.sandbox, config.harness, progress) for tasks in (train, held_out))
    check_on_images([task.image for task in (*train, *held_out) if task.image], config.harness)
    order = TrainingOrder([task.name for task in train], config.runtime.seed)
    evaluation = EvaluationPlan(
        tasks=tuple(task.name for task in held_out),
        samples=config.evaluation.samples,
        greedy=config.evaluation.greedy,
        temperature=config.policy.temperature,
    )
    scheduler = msgspec.structs.replace(
        config.scheduler,
        evaluation_every_steps=config.evaluation.every_steps,
        evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end,
        evaluation_group_sizes=evaluation.group_sizes() if config.evaluation.is_wanted else (),
    )
    tasks = {task.name: task for task in (*train, *held_out)}
    return Prepared(
        tasks, order, evaluation, scheduler, _model_dir(config, progress), load_hooks(config.hooks, config.tasks.source)
    )


def keep_policy(model_dir: Path, folder: RunFolder) -> None:
    """What the policy is beside its weights: `inspect` and `export` turn ids into text with it, and every checkpoint takes it along.

    But for its renderer, which the run decides.
    """
    copy_model_files(model_dir, folder.policy, leave_out=(folder.renderer.name,))


def load_folders(tasks: TasksConfig, *, trains: bool = True) -> tuple[list[Task], list[Task]]:
    """Tasks to train on and to hold out, out of folders. Raises ConfigError for the first that is wrong, and for one that is in both.

    Without training, only those to hold out.
    """
    train = _load(tasks.train, "tasks.train") if trains and tasks.train else []
    held_out = _load(tasks.held_out, "tasks.held_out") if tasks.held_out else []
    shared = {task.name for task in train} & {task.name for task in held_out}
    if shared:
        raise ConfigError(f"{min(shared)} is in both tasks.train and tasks.held_out", key="tasks.held_out")
    return train, held_out


def _load(folder: str, key: str) -> list[Task]:
    """Raises ConfigError, with the key when it is the folder itself that is wrong."""
    try:
        return load_tasks(Path(folder))
    except ConfigError as error:
        if error.file != folder:
            raise
        raise ConfigError(error.message, file=folder, key=key) from error


def _tasks(config: RunConfig) -> tuple[list[Task], list[Task]]:
    if not config.tasks.family:
        return load_folders(config.tasks, trains=config.scheduler.steps > 0)
    folder = _generate_family(config)
    train, held_out = load_tasks(folder / "train"), load_tasks(folder / "held-out")
    return without_images(train), without_images(held_out)


def without_images(tasks: list[Task]) -> list[Task]:
    """Tasks of a family need no image: they are made for the programs of any machine."""
    return [msgspec.structs.replace(task, wanted_image=None) for task in tasks]


def _generate_family(config: RunConfig) -> Path:
    from qwengyre.sandbox.families.mini_repositories import EDITION, generate

    wanted, seed = config.tasks, config.runtime.seed
    name = f"{wanted.family}-{EDITION}-{seed}-{wanted.num_train}-{wanted.num_held_out}"
    folder = Path(config.policy.cache) / "tasks" / name
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
    return Path(config.policy.model)
