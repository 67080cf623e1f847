"""All that can be found wrong with a run before any part of it is started, and all of it at once."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.config.installation import to_have
from qwengyre.core.errors import ConfigError, LimitsRefused, ModelRefused, QwenGyreError
from qwengyre.hooks.loaded import load_hooks
from qwengyre.models.hub import refuse_folder_name
from qwengyre.models.weight_files import weight_files
from qwengyre.rpc.tls import Contexts
from qwengyre.runtime.notes import answer_cap, context_cap, model_positions
from qwengyre.runtime.prepare import load_folders
from qwengyre.runtime.private_folders import private_folders
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.harbor.check import check_harbor, mistakes_with_harbor
from qwengyre.sandbox.harness import RESERVED
from qwengyre.sandbox.preflight import check_harness
from qwengyre.sandbox.readable import check_readable
from qwengyre.sandbox.task import Task, check_tasks, find_task_folders
from qwengyre.sandbox.task_files import MIB
from qwengyre.sandbox.task_images import mistakes_with_images
from qwengyre.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig

OPTIONAL: Final = ("ray", "mooncake")
"""Values of runtime.launcher and transfer.transport that need the module of that name, which the extra of that name brings."""
MAX_TASK_ERRORS: Final = 20
"""A whole folder may be wrong in the same way: `qwengyre tasks check` lists all of it."""

Mistakes = Iterator[QwenGyreError]


def check_run(config: RunConfig, run_folder: Path | None = None) -> None:
    """Raises what is wrong: one QwenGyreError, or an ExceptionGroup of several. `run_folder` is where the run will be, if that is known."""
    mistakes = mistakes_in(config, run_folder)
    if len(mistakes) > 1:
        raise ExceptionGroup("the run cannot start", mistakes)
    if mistakes:
        raise mistakes[0]


def mistakes_in(config: RunConfig, run_folder: Path | None = None, *, with_model: bool = False) -> list[QwenGyreError]:
    """Everything that is wrong. `with_model` looks into the model too, which takes seconds: cells say the same when they start."""
    found: list[QwenGyreError] = []
    for look in (*CHECKS, _check_model) if with_model else CHECKS:
        try:
            found += look(config)
        except QwenGyreError as error:
            found += getattr(error, "mistakes", ()) or [error]
    try:
        check_readable(config.harness, private_folders(config, run_folder))
    except QwenGyreError as error:
        found.append(error)
    return found


def _check_what_is_decided_elsewhere(config: RunConfig) -> Mistakes:
    """The scheduler's own keys of an evaluation follow from the held-out tasks and from [evaluation]."""
    given, default = config.scheduler, SchedulerConfig()
    for name in ("evaluation_every_steps", "evaluate_at_start", "evaluate_at_end", "evaluation_group_sizes"):
        if getattr(given, name) != getattr(default, name):
            yield ConfigError("a run takes this from its [evaluation] table: set it there", key=f"scheduler.{name}")


def _check_rules(config: RunConfig) -> Mistakes:
    read_harness_rules(config.trajectory.harness_rules)
    yield from ()


def _check_tasks(config: RunConfig) -> Mistakes:
    tasks = config.tasks
    if tasks.family:
        if config.sandbox.kind == "harbor":
            yield ConfigError(
                "tasks of a family have no environment that Harbor could build: name folders of tasks", key="tasks.family"
            )
        yield from _check_cache(config)
        return
    trains = config.scheduler.steps > 0
    wrong = [
        *(_wrong_tasks(tasks.train, "tasks.train") if trains and tasks.train else ()),
        *(_wrong_tasks(tasks.held_out, "tasks.held_out") if tasks.held_out else ()),
    ]
    yield from wrong
    if not wrong:
        loaded = list(itertools.chain(*load_folders(tasks, trains=trains)))
        yield from _check_loaded(config, loaded)
    if config.evaluation.is_wanted and not tasks.held_out:
        yield ConfigError(
            "there are no held-out tasks to evaluate on: set it, or switch [evaluation] at_start and at_end off",
            key="tasks.held_out",
        )


def _check_loaded(config: RunConfig, tasks: list[Task]) -> Mistakes:
    if config.sandbox.kind == "harbor":
        yield from mistakes_with_harbor(tasks, config.sandbox.harbor)
        return
    for task in tasks:
        yield from _too_large(task, config.harness.limits)
    yield from mistakes_with_images(tasks, config.sandbox, config.harness)


def _too_large(task: Task, limits: LimitsConfig) -> Mistakes:
    """Every execution of it would be over its limits before it began."""
    num_mb = -(-task.environment_bytes // MIB)
    for key, size, limit in (("disk_mb", num_mb, limits.disk_mb), ("files", task.environment_files, limits.files)):
        if size > limit:
            message = f"{task.name}'s environment/ takes {size:,}, more than a workspace may ({limit:,}): raise it"
            yield ConfigError(message, key=f"harness.limits.{key}")


def _wrong_tasks(folder: str, key: str) -> Mistakes:
    try:
        _, problems = check_tasks(Path(folder))
    except ConfigError as error:
        yield ConfigError(error.message, file=error.file, key=key)
        return
    errors = [problem for problem in problems if problem.severity == "error"]
    for problem in errors[:MAX_TASK_ERRORS]:
        yield ConfigError(problem.message, file=problem.file, line=problem.line or None)
    if errors[MAX_TASK_ERRORS:]:
        yield ConfigError(f"{len(errors) - MAX_TASK_ERRORS} more errors: qwengyre tasks check {folder}", file=folder)


def _check_policy(config: RunConfig) -> Mistakes:
    """A model's folder, its tokenizer, and the chat template that is to render for it."""
    if not config.policy.model:
        yield from _check_cache(config)
        return
    folder = Path(config.policy.model)
    if not folder.is_absolute():  # of the hub, fetched when the run starts
        refuse_folder_name(config.policy.model, Path.cwd())
        return
    if not folder.is_dir():
        yield ConfigError(
            f"{folder} does not exist: name the folder of a Hugging Face model, or one of the hub as OWNER/NAME",
            key="policy.model",
        )
        return
    wrong = list(_wrong_files(folder))
    yield from wrong
    if not wrong:
        if config.engine.engine == "embedded":
            yield from _wrong_weights(folder)
        _check_renderer(config)


def _wrong_files(folder: Path) -> Mistakes:
    names = ("config.json", "tokenizer.json")
    if missing := [name for name in names if not (folder / name).is_file()]:
        yield ConfigError(
            f"{folder} has no {' and no '.join(missing)}: it must be the folder of a Hugging Face model", key="policy.model"
        )
    for name in names:
        try:
            if name not in missing:
                msgspec.json.decode((folder / name).read_bytes(), type=dict)
        except (OSError, msgspec.MsgspecError) as error:
            yield ConfigError(f"this file of policy.model cannot be read: {error}", file=str(folder / name))


def _wrong_weights(folder: Path) -> Mistakes:
    try:
        weight_files(folder)
    except ModelRefused as error:
        yield ConfigError(str(error), key="policy.model")


def _check_renderer(config: RunConfig) -> None:
    from qwengyre.gateway.rendering import Rendering

    Rendering.from_folder(config.policy.model, config.gateway.renderer)


def _check_model(config: RunConfig) -> Mistakes:
    """That engine and trainer can use the policy's model, without its weights. Imports torch, which a controller does without."""
    if not config.policy.model:
        _check_adapters_of_warm_up(config)
    folder = Path(config.policy.model)
    if folder.is_absolute() and config.engine.engine in ("embedded", "vllm") and not list(_wrong_files(folder)):
        from qwengyre.engines.served import check_folder as check_served
        from qwengyre.trainer.preflight import check_folder

        check_folder(folder, min(config.policy.max_context_tokens, config.engine.max_context_tokens), config.trainer.lora)
        if config.engine.engine == "embedded":  # vLLM says at its start what it does not serve
            check_served(folder)
    yield from ()


def _check_adapters_of_warm_up(config: RunConfig) -> None:
    """The policy is still to be made, but its layers are known."""
    lora = config.trainer.lora
    if lora.rank and config.engine.engine == "embedded":
        from qwengyre.models.adapters import find_targets
        from qwengyre.warmup.training import outline

        find_targets(outline(config.warmup), lora.targets)


def _check_cache(config: RunConfig) -> Mistakes:
    """What is generated or warmed up is written there."""
    place = Path(config.policy.cache)
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield ConfigError(f"{place} cannot be made or written to (see {existing})", key="policy.cache")


def _check_lengths(config: RunConfig) -> Mistakes:
    context, answer = context_cap(config), answer_cap(config)
    if answer.value >= context.value:
        yield ConfigError(
            f"an answer may have {answer.value} tokens, which leaves no room for a prompt in a context of {context.value} "
            f"({context.key}): raise that, or lower {answer.key}",
            key=answer.key,
        )
    positions = model_positions(config)
    if config.engine.engine == "vllm" and positions and config.engine.max_context_tokens > positions:
        yield ConfigError(
            f"vLLM serves at most the {positions} tokens that the model was made for (max_position_embeddings)",
            key="engine.max_context_tokens",
        )
    if context.value > config.trainer.max_row_tokens:
        yield ConfigError(
            f"a context of {context.value} tokens is longer than the {config.trainer.max_row_tokens} that a trainer takes, and a path is "
            "never cut: raise it, or lower policy.max_context_tokens",
            key="trainer.max_row_tokens",
        )


def _check_objective(config: RunConfig) -> Mistakes:
    """Half of an objective with a KL term would be left out in silence: the executions that have nothing else to learn from."""
    if config.trainer.kl_coefficient and not config.trajectory.keep_zero_advantage:
        yield ConfigError(
            "executions of advantage 0 have a KL term, too: set it to true, or trainer.kl_coefficient to 0",
            key="trajectory.keep_zero_advantage",
        )


def _check_group_size(config: RunConfig) -> Mistakes:
    """An execution is compared with the others of its group."""
    if config.scheduler.executions_per_group < 2:
        yield ConfigError(
            "an execution is compared with the others of its group, so that alone it teaches nothing: set at least 2, 8 is usual",
            key="scheduler.executions_per_group",
        )


def _check_steps(config: RunConfig) -> Mistakes:
    """Without steps there is one version, which is evaluated at the start; a served model has its weights to itself."""
    if not config.scheduler.steps and not config.evaluation.at_start:
        yield ConfigError(
            "without steps there is nothing to do but an evaluation at the start: switch that on", key="evaluation.at_start"
        )
    if config.engine.engine == "served" and config.scheduler.steps:
        yield ConfigError(
            "a served model is evaluated, never trained: its weights are elsewhere. `qwengyre evaluate`, or scheduler.steps = 0",
            key="engine.engine",
        )


def _check_ranks(config: RunConfig) -> Mistakes:
    """What would have no effect, and would be looked for in vain."""
    if config.engine.engine == "paced" and config.trainer.ranks > 1:
        yield ConfigError("a paced cell computes nothing, so there is nothing to share out: leave it at 1", key="trainer.ranks")
    if config.ray.ranks_per_node and config.runtime.launcher != "ray":
        yield ConfigError(
            'only the launcher "ray" starts ranks on other nodes: set runtime.launcher, or this to 0', key="ray.ranks_per_node"
        )


def _check_lora(config: RunConfig) -> Mistakes:
    """Engines that could not tell adapters from whole weights."""
    if config.trainer.lora.rank and config.engine.engine not in ("embedded", "served"):
        why = "a paced cell trains nothing" if config.engine.engine == "paced" else "adapters in vLLM are not built"
        yield ConfigError(f'{why}: leave it at 0, or take engine.engine = "embedded"', key="trainer.lora.rank")


def _check_packages(config: RunConfig) -> Mistakes:
    for key, value in (("runtime.launcher", config.runtime.launcher), ("transfer.transport", config.transfer.transport)):
        if value in OPTIONAL and importlib.util.find_spec(value) is None:
            yield ConfigError(f"{value} is not installed: {to_have(value)}", key=key)
    for name in config.tracking.to:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            yield ConfigError(f"{name} is not installed: {to_have(name)}", key="tracking.to")
    if config.tracking.checkpoints and "trackio" in config.tracking.to:
        yield ConfigError(
            "trackio keeps no checkpoints: take it out of tracking.to, or set this to false", key="tracking.checkpoints"
        )
    if config.engine.engine == "vllm":
        from qwengyre.engines.vllm.launch import require_vllm

        require_vllm()


def _check_wires(config: RunConfig) -> Mistakes:
    """What asks nobody who he is, the user has to answer for."""
    if config.transfer.transport == "mooncake" and not config.transfer.mooncake_trusts_network:
        yield ConfigError(
            "Mooncake lets whoever reaches a node's ports read and overwrite weights and KV. Set it to true if a firewall or a network of "
            'their own keeps everybody else from the nodes; else use transport = "tcp"',
            key="transfer.mooncake_trusts_network",
        )
    if config.tls.is_wanted:
        Contexts.load(config.tls)
        sums = (
            config.scheduler.steps > 0
            and config.runtime.launcher == "ray"
            and config.scheduler.num_cells * config.trainer.ranks > 1
        )
        if sums and not config.tls.sums_trust_network:
            yield ConfigError(
                "gradients are summed by gloo, which speaks no TLS in torch's builds. Set it to true if a tunnel between the nodes, such as "
                "WireGuard, or a network of their own keeps everybody else from them",
                key="tls.sums_trust_network",
            )


def _check_gateway(config: RunConfig) -> Mistakes:
    """That its certificate can be served."""
    if config.gateway.tls_certificate:
        from qwengyre.gateway.listener import tls_context

        tls_context(config.gateway)
    yield from ()


def _check_harness(config: RunConfig) -> Mistakes:
    """With the workspaces of its tasks, which may bring what the command names."""
    if config.sandbox.kind == "harbor":
        check_harbor(config.sandbox.harbor)
        return
    for name in sorted(RESERVED & config.harness.env.keys()):
        yield ConfigError(
            "every execution gets this for itself, with its own address and key: leave it out", key=f"harness.env.{name}"
        )
    workspaces: list[Path] = []
    for folder in filter(None, (config.tasks.train, config.tasks.held_out)):
        with contextlib.suppress(ConfigError):  # is told by _check_tasks
            workspaces += [task / "environment" for task in find_task_folders(Path(folder))]
    if _all_on_images(config):
        return
    try:
        check_harness(config.harness, workspaces)
    except LimitsRefused as error:
        yield error
        limits = msgspec.structs.replace(config.harness.limits, best_effort=True)  # what is wrong beside that is told as well
        check_harness(msgspec.structs.replace(config.harness, limits=limits), workspaces)


def _all_on_images(config: RunConfig) -> bool:
    """Whether the harness need not be on this machine: it is looked for in the images, once they are here."""
    if config.sandbox.host_programs or config.tasks.family:
        return bool(config.sandbox.image) and not config.sandbox.host_programs
    try:
        tasks = list(itertools.chain(*load_folders(config.tasks, trains=config.scheduler.steps > 0)))
    except ConfigError:
        return False
    return bool(config.sandbox.image) or all(task.wanted_image for task in tasks)


def _check_hooks(config: RunConfig) -> Mistakes:
    """Imports the modules of the user's own. Beside that, what would have no effect, or a wrong one."""
    load_hooks(config.hooks, config.tasks.source)
    if config.tasks.source and config.scheduler.order != "dispatch":
        yield ConfigError(
            "groups are put in another order by what is known of the tasks to come, which a source of your own has not chosen yet: leave it at "
            '"dispatch"',
            key="scheduler.order",
        )
    if config.hooks.token_loss and config.engine.engine == "paced":
        yield ConfigError("a paced cell computes no loss, so this would never be called: leave it out", key="hooks.token_loss")
    if config.hooks.advantage and config.trainer.normalizes_advantages:
        yield ConfigError(
            "trainer.normalize_advantages divides by the standard deviation of advantages whose mean is 0 in every group, which those of a "
            "hook need not be: set trainer.normalize_advantages = false, and divide in the hook",
            key="hooks.advantage",
        )


CHECKS: Final[tuple[Callable[[RunConfig], Iterable[QwenGyreError]], ...]] = (
    _check_what_is_decided_elsewhere,
    _check_lengths,
    _check_objective,
    _check_group_size,
    _check_steps,
    _check_ranks,
    _check_lora,
    _check_packages,
    _check_wires,
    _check_gateway,
    _check_rules,
    _check_tasks,
    _check_policy,
    _check_harness,
    _check_hooks,
)
