"""What is worth knowing of a run that can start: its size, what caps what, settings that suit another case than this one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from qwengyre.core.errors import ConfigError, ModelRefused
from qwengyre.gateway.config import GatewayConfig
from qwengyre.models.weight_files import weight_files
from qwengyre.sandbox.command import unknown_placeholders
from qwengyre.sandbox.task import find_task_folders
from qwengyre.trainer.published import PUBLISHED

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig

GB: Final = 1e9
NARROW: Final = 4
"""A clip range that is this many times narrower than the published one clips what the objective is meant to learn from."""
SHORT_ANSWER_TOKENS: Final = 512
SMALL_MODEL_BYTES: Final = 400_000_000
"""About 100 million parameters in float32: far from the models that the default learning rate is for."""
MANY_PASSES: Final = 20
REFERENCE_HARNESS: Final = "qwengyre_harness"
TCP_KEYS: Final = ("host", "port", "public_url", "tls_certificate")
WARMED_UP_FAMILY: Final = "mini-repositories"


def size_of(config: RunConfig) -> str:
    """One line: tasks, and how many executions they become."""
    train, held_out = num_tasks(config)
    scheduler, evaluation = config.scheduler, config.evaluation
    groups = scheduler.steps * scheduler.groups_per_step
    executions = groups * scheduler.executions_per_group
    line = (
        f"{train} tasks to train on, {held_out} held out; {scheduler.steps} steps x {scheduler.groups_per_step} groups x "
        f"{scheduler.executions_per_group} executions = {executions:,} executions"
    )
    if evaluation.is_wanted:
        line += f", and {held_out * (evaluation.samples + evaluation.greedy):,} for each evaluation"
    return line


def worth_knowing(config: RunConfig) -> list[str]:
    """Sentences, each for itself; none is a mistake for sure."""
    return [note for look in NOTES for note in look(config)]


def num_tasks(config: RunConfig) -> tuple[int, int]:
    tasks = config.tasks
    if tasks.family:
        return tasks.num_train, tasks.num_held_out
    return _count(tasks.train) if tasks.train else 0, _count(tasks.held_out) if tasks.held_out else 0


def _count(folder: str) -> int:
    try:
        return len(find_task_folders(Path(folder)))
    except ConfigError:
        return 0


class Cap(msgspec.Struct, frozen=True):
    """The limit that counts, of several keys."""

    value: int
    key: str
    """The key that has it."""


def context_cap(config: RunConfig) -> Cap:
    """The longest prompt and answer together."""
    return _least(
        {
            "policy.max_context_tokens": config.policy.max_context_tokens,
            "engine.max_context_tokens": config.engine.max_context_tokens,
            "gateway.max_context_tokens": config.gateway.max_context_tokens,
        }
    )


def answer_cap(config: RunConfig) -> Cap:
    """The longest answer of one call."""
    return _least(
        {
            "policy.max_tokens_per_call": config.policy.max_tokens_per_call,
            "gateway.max_tokens_per_call": config.gateway.max_tokens_per_call,
        }
    )


def _least(limits: dict[str, int]) -> Cap:
    key = min(limits, key=lambda key: limits[key])
    return Cap(limits[key], key)


def _caps(config: RunConfig) -> Iterator[str]:
    for what, cap, key in (
        ("contexts", context_cap(config), "policy.max_context_tokens"),
        ("answers", answer_cap(config), "policy.max_tokens_per_call"),
    ):
        table, name = key.split(".")
        wanted = getattr(getattr(config, table), name)
        if cap.key != key:
            yield f"{what} have at most {cap.value:,} tokens: {cap.key} = {cap.value} caps {key} = {wanted}"


def _positions(config: RunConfig) -> Iterator[str]:
    known = model_positions(config)
    cap = context_cap(config)
    if known and cap.value > known:
        yield f"contexts of up to {cap.value:,} tokens ({cap.key}) are longer than the {known:,} that the model was made for"


def model_positions(config: RunConfig) -> int | None:
    """`max_position_embeddings` of the policy's config; None without a model, or with a scaled rotary embedding."""
    file = Path(config.policy.model, "config.json")
    if not config.policy.model or not file.is_file():
        return None
    try:
        told = msgspec.json.decode(file.read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError):
        return None
    told = told.get("text_config") or told
    rope = told.get("rope_scaling") or told.get("rope_parameters") or {}
    is_scaled = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default"
    found = told.get("max_position_embeddings")
    return found if isinstance(found, int) and not is_scaled else None


def _harness(config: RunConfig) -> Iterator[str]:
    harness = config.harness
    if config.sandbox.kind == "harbor":
        return
    if not harness.stdin and not any("{instruction" in part for part in harness.command):
        yield "the harness is not told its task: no argument has {instruction} or {instruction_file}, and harness.stdin is off"
    for name in unknown_placeholders(harness.command):
        yield f"harness.command: {name} is not a placeholder, the harness gets it as it is"
    if harness.isolation == "none":
        yield 'harness.isolation is "none": harnesses may read and write what you may'


def _gateway_address(config: RunConfig) -> Iterator[str]:
    """Sandboxes of this machine reach their gateway by a socket of their own."""
    given, default = config.gateway, GatewayConfig()
    told = [f"gateway.{name}" for name in TCP_KEYS if getattr(given, name) != getattr(default, name)]
    if told and not config.has_harnesses_outside:
        yield f'{", ".join(told)}: only harnesses without a sandbox use it; with isolation = "bwrap" no gateway opens a TCP port'


def _objective(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    published, (least, most) = PUBLISHED[trainer.objective], trainer.clip_range
    if most - least < (published.clip_low + published.clip_high) / NARROW:
        yield (
            f"trainer.clip_low and clip_high clip importance ratios outside {least:g} to {most:g}; {trainer.objective} was published "
            f"with {1 - published.clip_low:g} to {1 + published.clip_high:g}"
        )
    elif most - least < 0.05 and answer_cap(config).value < SHORT_ANSWER_TOKENS:
        yield (
            f"trainer.clip_low and clip_high clip importance ratios outside {least:g} to {most:g}, which is for trajectories of thousands"
            f" of tokens; answers have at most {answer_cap(config).value} here. The quickstart's short turns take 0.1 for both"
        )
    size = weights_bytes(config)
    is_small = not config.policy.model or (size is not None and size < SMALL_MODEL_BYTES)
    if is_small and trainer.learning_rate <= 1e-5:
        yield (
            f"trainer.learning_rate = {trainer.learning_rate:g} is for models of a billion parameters and more; the quickstart trains "
            "a million of them with 7e-4"
        )


def weights_bytes(config: RunConfig) -> int | None:
    """Size of the policy's weights; None without a model."""
    if not config.policy.model:
        return None
    try:
        return sum(file.stat().st_size for file in weight_files(Path(config.policy.model)))
    except (ModelRefused, OSError):
        return None


def _effort(config: RunConfig) -> Iterator[str]:
    train, _ = num_tasks(config)
    passes = config.scheduler.steps * config.scheduler.groups_per_step / max(1, train)
    if train and passes > MANY_PASSES:
        yield f"each of the {train} tasks is trained on about {passes:.0f} times"
    if not config.evaluation.is_wanted:
        yield "no held-out task is ever run: the report will not tell what was learned beyond the tasks trained on"
    threads, cores = config.scheduler.num_cells * config.runtime.threads_per_cell, len(os.sched_getaffinity(0))
    if config.runtime.launcher == "local" and threads > 2 * cores:
        yield f"{config.scheduler.num_cells} cells of {config.runtime.threads_per_cell} threads share {cores} cores"


def _disk(config: RunConfig) -> Iterator[str]:
    size = weights_bytes(config)
    if size is None or not config.runtime.audit_logprobs:
        return
    needed, free = size * (config.scheduler.steps + 1), shutil.disk_usage(Path.cwd()).free
    if needed > free / 2:
        yield (
            f"runtime.audit_logprobs keeps the weights of every step, about {needed / GB:.0f} GB of the {free / GB:.0f} GB that are free "
            "here: switch it off, or choose another --runs-dir"
        )


def _warmed_up(config: RunConfig) -> Iterator[str]:
    """The policy of the warm-up has seen one harness and one family of tasks, word by word."""
    if config.policy.model:
        if not os.path.isabs(config.policy.model):
            yield f"policy.model: there is no folder {config.policy.model} here, so it is fetched from the hub when the run starts, and looked at then"
        return
    others = [] if any(REFERENCE_HARNESS in part for part in config.harness.command) else ["harness.command"]
    if config.tasks.family != WARMED_UP_FAMILY:
        others.append("tasks")
    if others:
        yield (
            f"policy.model is empty, and the policy that is made for that knows the tools of {REFERENCE_HARNESS} and the tasks of "
            f"{WARMED_UP_FAMILY} only: with other {' and '.join(others)} it will do nothing of use, so name a model"
        )


NOTES: Final[tuple[Callable[[RunConfig], Iterator[str]], ...]] = (
    _caps,
    _positions,
    _harness,
    _gateway_address,
    _warmed_up,
    _objective,
    _effort,
    _disk,
)
