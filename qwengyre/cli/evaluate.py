"""`qwengyre evaluate RUN.toml`: what a policy, or a model that is served elsewhere, scores on tasks. Nothing is trained."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from qwengyre.cli.output import say, say_progress, write_text
from qwengyre.cli.train import run_in
from qwengyre.config.dump import dump_toml
from qwengyre.core.errors import ConfigError, EngineError
from qwengyre.core.records import Validity
from qwengyre.recorded.run import RecordedRun
from qwengyre.runtime.records import ExecutionDone
from qwengyre.runtime.run_config import RunConfig, load_run
from qwengyre.telemetry.folder import RunFolder

NO_TRAINING = (
    "scheduler.steps=0",
    "scheduler.policy=elastic",
    "evaluation.at_start=true",
    "evaluation.at_end=false",
    "evaluation.every_steps=0",
    "runtime.audit_logprobs=false",
)


class TaskScore(msgspec.Struct, frozen=True):
    """What the executions of one task scored; dropped ones count nowhere."""

    task: str
    score: float | None
    """Mean at the training temperature."""
    greedy: float | None
    """At temperature 0."""
    scores: tuple[float, ...]
    num_dropped: int


class Evaluated(msgspec.Struct, frozen=True):
    """The outcome, also as `--json`."""

    run: str
    score: float | None
    """Mean over all executions at the training temperature."""
    standard_error: float | None
    """Of the score, from the spread over the tasks."""
    greedy: float | None
    tasks: tuple[TaskScore, ...]


def evaluate(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file: tasks.held_out, harness, policy, engine.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. evaluation.samples=8.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Folder of the tasks to run, in place of tasks.held_out.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="The policy, in place of policy.model: a model's folder, or a checkpoint of a run.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Evaluate what this server serves; --model has its tokenizer. Key: QWENGYRE_ENGINE_KEY."
        ),
    ] = "",
    served_as: Annotated[str, typer.Option(help="The model's name at that server, where it serves several.")] = "",
    as_json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the scores as JSON, `-` for the output.")] = "",
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
) -> None:
    """Score a policy on held-out tasks, without training it: a baseline, a checkpoint, or a model that is served elsewhere.

    The run folder is one as of `train`: `inspect`, `export` and `dashboard` read it, `train --resume` continues it.
    """
    changes = [*(overrides or []), *NO_TRAINING]
    if tasks is not None:
        changes += ["tasks.family=", f"tasks.train={json.dumps(str(tasks))}", f"tasks.held_out={json.dumps(str(tasks))}"]
    if model is not None:
        changes.append(f"policy.model={json.dumps(str(model))}")
    config = load_run(run_file, changes, say_progress)
    if engine:
        config = asyncio.run(_served(config, engine, served_as))
    runtime = msgspec.structs.replace(config.runtime, name=f"{config.runtime.name}-evaluation")
    config = msgspec.structs.replace(config, runtime=runtime)
    folder = RunFolder.create(runs_dir, config.runtime.name, dump_toml(config))
    run_in(config, folder, is_new=True, on_stderr=as_json == "-")
    found = evaluated(str(folder.path), RecordedRun.of(folder).scores.done.values())
    if as_json != "-":
        show(found)
    if as_json:
        write_text(Path(as_json), msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")


async def _served(config: RunConfig, url: str, served_as: str) -> RunConfig:
    """With a server in place of the engine, all of whose calls go through one cell. Raises ConfigError."""
    from qwengyre.engines.completions import choose_served, open_http

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not a URL: expected http:// or https://", key="--engine")
    if not config.policy.model:
        raise ConfigError("name the folder with the tokenizer of the model that is served", key="--model")
    async with open_http(url) as http:
        try:
            served = await choose_served(http, served_as, Path(config.policy.model).name)
        except EngineError as error:
            raise ConfigError(str(error), key="--served-as" if served_as else "--engine") from error
    most = min(config.policy.max_context_tokens, served.max_model_len or config.policy.max_context_tokens)
    engine = msgspec.structs.replace(
        config.engine, engine="served", dtype="float32", url=url, served_as=served.id, max_context_tokens=most, kv_blocks=1 << 30
    )
    old = config.scheduler
    slots = old.num_cells * old.slots_per_cell + old.num_standalone * old.slots_per_standalone
    scheduler = msgspec.structs.replace(old, num_cells=1, num_standalone=0, slots_per_cell=slots)
    return msgspec.structs.replace(config, engine=engine, scheduler=scheduler)


def evaluated(run: str, done: Iterable[ExecutionDone]) -> Evaluated:
    by_task: dict[str, list[ExecutionDone]] = {}
    for one in sorted(done, key=lambda one: one.execution):
        by_task.setdefault(one.task, []).append(one)
    tasks = tuple(_of_task(task, members) for task, members in sorted(by_task.items()))
    scores = [score for task in tasks for score in task.scores]
    means = [task.score for task in tasks if task.score is not None]
    greedy = [task.greedy for task in tasks if task.greedy is not None]
    return Evaluated(run, _mean(scores), _standard_error(means), _mean(greedy), tasks)


def _of_task(task: str, members: list[ExecutionDone]) -> TaskScore:
    counted = [one for one in members if one.outcome.validity is not Validity.DROPPED]
    sampled = tuple(one.outcome.score for one in counted if one.temperature > 0)
    greedy = [one.outcome.score for one in counted if not one.temperature > 0]
    return TaskScore(task, _mean(sampled), _mean(greedy), sampled, len(members) - len(counted))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _standard_error(means: list[float]) -> float | None:
    """Of the mean of tasks, which are drawn; executions of one task are alike."""
    if len(means) < 2:
        return None
    mean = sum(means) / len(means)
    return math.sqrt(sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means))


def show(found: Evaluated) -> None:
    """A line a task, then the score."""
    from qwengyre.cli.simulation import wide_console

    table = Table("task", box=SIMPLE_HEAD)
    for name in ("score", "greedy", "executions", "dropped"):
        table.add_column(name, justify="right")
    for task in found.tasks:
        cells = (_shown(task.score), _shown(task.greedy), str(len(task.scores)), str(task.num_dropped or ""))
        table.add_row(task.task, *cells)
    wide_console().print(table)
    error = f" ± {found.standard_error:.3f}" if found.standard_error is not None else ""
    say(f"score {_shown(found.score)}{error}, greedy {_shown(found.greedy)}, over {len(found.tasks)} tasks")
    say(f"look into its executions with: qwengyre inspect {found.run}")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
