"""All that can be found wrong with a run before any part of it is started, and all of it at once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.core.errors import ConfigError, ModelRefused, QwenGyreError
from qwengyre.engines.weight_files import weight_files
from qwengyre.runtime.prepare import load_folders
from qwengyre.sandbox.preflight import check_harness
from qwengyre.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig

OPTIONAL: Final = ("ray", "mooncake")
"""Values of runtime.launcher and transfer.carrier that need the module of that name, which the extra of that name brings."""


def check_run(config: RunConfig) -> None:
    """Raises what is wrong: one QwenGyreError, or an ExceptionGroup of several."""
    mistakes: list[QwenGyreError] = []
    for look in CHECKS:
        try:
            look(config)
        except QwenGyreError as error:
            mistakes.append(error)
    if len(mistakes) > 1:
        raise ExceptionGroup("the run cannot start", mistakes)
    if mistakes:
        raise mistakes[0]


def _check_what_is_decided_elsewhere(config: RunConfig) -> None:
    """The scheduler's own keys of an evaluation follow from the held-out tasks and from [evaluation]."""
    given, default = config.scheduler, SchedulerConfig()
    for name in ("evaluation_every_steps", "evaluate_at_start", "evaluate_at_end", "evaluation_group_sizes"):
        if getattr(given, name) != getattr(default, name):
            raise ConfigError("a run takes this from its [evaluation] table: set it there", key=f"scheduler.{name}")


def _check_rules(config: RunConfig) -> None:
    read_harness_rules(config.trajectory.harness_rules)


def _check_tasks(config: RunConfig) -> None:
    if config.tasks.family:
        _check_cache(config)
    else:
        load_folders(config.tasks)
        if config.evaluation.is_wanted and not config.tasks.held_out:
            raise ConfigError(
                "there are no held-out tasks to evaluate on: set it, or switch [evaluation] at_start and at_end off",
                key="tasks.held_out",
            )


def _check_policy(config: RunConfig) -> None:
    """A model's folder, its tokenizer, and the chat template that is to render for it."""
    if not config.policy.model:
        _check_cache(config)
        return
    folder = Path(config.policy.model)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} does not exist: name the folder of a Hugging Face model, downloaded before", key="policy.model"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: it must be the folder of a Hugging Face model", key="policy.model")
        try:
            msgspec.json.decode((folder / name).read_bytes(), type=dict)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"this file of policy.model cannot be read: {error}", file=str(folder / name)) from error
    if config.engine.engine == "embedded":
        _check_weights(folder)
    _check_renderer(config)


def _check_weights(folder: Path) -> None:
    try:
        weight_files(folder)
    except ModelRefused as error:
        raise ConfigError(str(error), key="policy.model") from error


def _check_renderer(config: RunConfig) -> None:
    from qwengyre.gateway.rendering import Rendering

    Rendering.from_folder(config.policy.model, config.gateway.renderer)


def check_model(config: RunConfig) -> None:
    """That the engine can use the policy's model. Imports torch, which a controller does without: they say the same when they
    start. Raises ConfigError or ModelRefused."""
    if not config.policy.model:
        return
    if config.engine.engine in ("embedded", "vllm"):
        from qwengyre.engines.model import read_spec

        read_spec(Path(config.policy.model))


def _check_cache(config: RunConfig) -> None:
    """What is generated or warmed up is written there."""
    place = Path(config.policy.cache)
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{place} cannot be made or written to (see {existing})", key="policy.cache")


def _check_lengths(config: RunConfig) -> None:
    context = min(config.policy.max_context_tokens, config.engine.max_context_tokens)
    if context > config.trainer.max_row_tokens:
        raise ConfigError(
            f"a context of {context} tokens is longer than the {config.trainer.max_row_tokens} that a trainer takes, and a path is "
            "never cut: raise it, or lower policy.max_context_tokens",
            key="trainer.max_row_tokens",
        )


def _check_objective(config: RunConfig) -> None:
    """Half of an objective with a KL term would be left out in silence: the executions that have nothing else to learn from."""
    if config.trainer.kl_coefficient and not config.trajectory.keep_zero_advantage:
        raise ConfigError(
            "executions of advantage 0 have a KL term, too: set it to true, or trainer.kl_coefficient to 0",
            key="trajectory.keep_zero_advantage",
        )


def _check_group_size(config: RunConfig) -> None:
    """An execution is compared with the others of its group."""
    if config.scheduler.executions_per_group < 2:
        raise ConfigError(
            "an execution is compared with the others of its group, so that alone it teaches nothing: set at least 2, 8 is usual",
            key="scheduler.executions_per_group",
        )


def _check_ranks(config: RunConfig) -> None:
    """What would have no effect, and would be looked for in vain."""
    if config.engine.engine == "paced" and config.trainer.ranks > 1:
        raise ConfigError("a paced cell computes nothing, so there is nothing to share out: leave it at 1", key="trainer.ranks")
    if config.ray.ranks_per_node and config.runtime.launcher != "ray":
        raise ConfigError(
            'only the launcher "ray" starts ranks on other nodes: set runtime.launcher, or this to 0', key="ray.ranks_per_node"
        )


def _check_packages(config: RunConfig) -> None:
    for key, value in (("runtime.launcher", config.runtime.launcher), ("transfer.carrier", config.transfer.carrier)):
        if value in OPTIONAL and importlib.util.find_spec(value) is None:
            raise ConfigError(f"{value} is not installed: pip install -e '.[{value}]'", key=key)
    if config.engine.engine == "vllm":
        from qwengyre.engines.vllm.launch import require_vllm

        require_vllm()


def _check_harness(config: RunConfig) -> None:
    check_harness(config.harness)


CHECKS: Final[tuple[Callable[[RunConfig], None], ...]] = (
    _check_what_is_decided_elsewhere,
    _check_lengths,
    _check_objective,
    _check_group_size,
    _check_ranks,
    _check_packages,
    _check_rules,
    _check_tasks,
    _check_policy,
    _check_harness,
)
