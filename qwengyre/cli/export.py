"""`qwengyre export`: the trajectories of a run, token by token as Parquet, or as chat messages for supervised training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import typer

from qwengyre.cli.chat_rows import Chatml, chat_row
from qwengyre.cli.options import named_as
from qwengyre.cli.output import replaced, say
from qwengyre.cli.run_context import RunSettings, find_tokenizer, load_harness_rules, open_run, run_settings
from qwengyre.core.arrays import FLAG, LOGPROB, TOKEN, VERSION, unpack
from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.core.records import Trajectory
from qwengyre.recorded.run import RecordedRun, Scores
from qwengyre.runtime.records import ExecutionDone
from qwengyre.trajectory.advantages import group_advantages
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.harness_rules import HarnessRules
from qwengyre.trajectory.match import Turn
from qwengyre.trajectory.process import execution_rng
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.sampling import chosen_trajectories, sample_trajectories
from qwengyre.trajectory.tree import TrajectoryTree

ROWS_PER_WRITE = 64  # bounds memory: one row may hold a whole path


class Format(Enum):
    PARQUET = "parquet"
    CHAT = "chat"


FORMATS: Final = {".parquet": Format.PARQUET, ".jsonl": Format.CHAT}
"""By the end of the file's name."""


class ExportRow(msgspec.Struct, frozen=True):
    """One trajectory and what its execution was worth."""

    execution: ExecutionId
    group: int | None
    attempt: int
    task: str
    index: int
    """Place among the chosen trajectories of its execution."""
    reward: float | None
    advantage: float | None
    """None for a gateway that ran alone, and for executions that were dropped."""
    end: str
    validity: str
    temperature: float
    trajectory: Trajectory


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder or journal of a gateway.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .parquet, or .jsonl for chat.")],
    form: Annotated[
        Format | None,
        typer.Option("--format", help="One row per trajectory, or chat messages; told from the file's name by default."),
    ] = None,
    j_max: Annotated[
        int | None, typer.Option(min=0, help="Most trajectories of one execution, 0 for all; as trained by default.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only executions with at least this reward.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder to read tokens as chat; the run's own by default.")] = None,
    renderer: Annotated[
        str | None,
        typer.Option(help="Name in the `renderers` package that reads answers (qwen3, qwen3.5, ...); the run's by default."),
    ] = None,
    harness_rules: Annotated[
        Path | None, typer.Option(help="TOML file that tells the roles of a harness; the run's own by default.")
    ] = None,
) -> None:
    """Write the trajectories of a run, as they were chosen for training.

    Executions of advantage 0 are written too; those that were not sampled for training (evaluations, T = 0) have no trainable token and no row.
    """
    recorded = open_run(run)
    settings = run_settings(recorded)
    rules = load_harness_rules(settings, harness_rules)
    rows = _rows(recorded, settings, rules, j_max)
    wanted = (row for row in rows if min_reward is None or (row.reward is not None and row.reward >= min_reward))
    if (form or FORMATS.get(out.suffix)) is None:
        raise ConfigError(
            f"its name does not say which format: end it in {' or '.join(FORMATS)}, or give --format", file=str(out)
        )
    if (form or FORMATS[out.suffix]) is Format.PARQUET:
        with replaced(out) as part:
            num_rows = write_parquet(wanted, part)
    else:
        folder = find_tokenizer(recorded, settings, tokenizer)
        if folder is None:
            raise ConfigError("the run has no tokenizer: name the model's folder", key="--tokenizer")
        chatml = open_chatml(folder, {"name": renderer} if renderer else settings.renderer)
        with replaced(out) as part, open(part, "w", encoding="utf-8") as file:
            num_rows, num_changed = write_chat(wanted, file, chatml)
        if num_changed:
            say(
                f"note: {num_changed:,} do not render back to the recorded text: `renders_back` is false in their lines", err=True
            )
    say(f"wrote {num_rows:,} trajectories to {out}")


def _rows(run: RecordedRun, settings: RunSettings, rules: tuple[HarnessRules, ...], j_max: int | None) -> Iterator[ExportRow]:
    most = (settings.trajectory.j_max if j_max is None else j_max) or None
    advantages = group_advantages_of(run.scores, settings.trajectory)
    for recorded in run.last_attempts():
        if not recorded.is_trainable:
            continue
        done = run.scores.done.get(recorded.opened.execution)
        tree = TrajectoryTree(recorded)
        roles = assign_roles(tree.calls, rules)
        choice = run.scores.choice_of(done) if done is not None and j_max is None else None
        if choice is not None:
            chosen = chosen_trajectories(tree, roles, choice)
        else:
            rng = execution_rng(settings.seed, recorded.opened.execution)
            chosen = sample_trajectories(tree, roles, j_max=most, rng=rng)
        for index, trajectory in enumerate(chosen):
            yield _row(recorded, done, advantages, index, trajectory)


def _row(
    recorded: CallLog,
    done: ExecutionDone | None,
    advantages: dict[ExecutionId, float | None],
    index: int,
    trajectory: Trajectory,
) -> ExportRow:
    opened = recorded.opened
    return ExportRow(
        execution=opened.execution,
        group=done.group if done else None,
        attempt=opened.attempt,
        task=done.task if done else "",
        index=index,
        reward=done.outcome.score if done else None,
        advantage=advantages.get(opened.execution),
        end=done.outcome.end.value if done else "",
        validity=done.outcome.validity.value if done else "",
        temperature=opened.temperature,
        trajectory=trajectory,
    )


def group_advantages_of(scores: Scores, settings: TrajectoryConfig) -> dict[ExecutionId, float | None]:
    """Advantage of every execution of the training groups whose executions have all ended."""
    groups: dict[GroupId, list[ExecutionDone]] = {}
    for done in sorted(scores.done.values(), key=lambda done: done.execution):
        groups.setdefault(done.group, []).append(done)
    advantages: dict[ExecutionId, float | None] = {}
    for group, members in groups.items():
        dispatch = scores.dispatches.get(group)
        if dispatch is not None and dispatch.kind == "train" and len(members) == dispatch.num_executions:
            judged = scores.judged.get(group)
            outcomes = [done.outcome for done in members]
            values = judged.advantages if judged else group_advantages(outcomes, divide_by_std=bool(settings.divide_by_std))
            advantages |= {done.execution: value for done, value in zip(members, values, strict=True)}
    return advantages


def write_parquet(rows: Iterator[ExportRow], out: Path) -> int:
    """Write in batches, so that memory does not grow with the run. Returns the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("execution", pa.string()),
            ("group", pa.int64()),
            ("attempt", pa.int32()),
            ("task", pa.string()),
            ("index", pa.int32()),
            ("role", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("end", pa.string()),
            ("validity", pa.string()),
            ("temperature", pa.float64()),
            ("token_ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int32())),
        ]
    )
    num_rows = 0
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(_parquet_row(row))
            num_rows += 1
            if len(batch) == ROWS_PER_WRITE:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema))
    return num_rows


def _parquet_row(row: ExportRow) -> dict[str, Any]:
    chosen = row.trajectory
    fields = {name: getattr(row, name) for name in row.__struct_fields__ if name != "trajectory"}
    return fields | {
        "role": chosen.role.value,
        "token_ids": unpack(chosen.token_ids_T, TOKEN),
        "mask": unpack(chosen.trainable_T, FLAG),
        "logprobs": unpack(chosen.logprob_T, LOGPROB),
        "versions": unpack(chosen.version_T, VERSION),
    }


def write_chat(rows: Iterator[ExportRow], file: IO[str], chatml: Chatml) -> tuple[int, int]:
    """One JSON object a line: messages, tools, and what the execution was worth. Returns the number of lines, and how many of them do
    not render back to the recorded text."""
    num_rows = num_changed = 0
    for row in rows:
        chosen = row.trajectory
        read = chat_row(unpack(chosen.token_ids_T, TOKEN), unpack(chosen.trainable_T, FLAG), chatml)
        fields = {name: getattr(row, name) for name in ("execution", "task", "index", "reward", "advantage", "end")}
        line = fields | {"role": chosen.role.value, "messages": read.messages, "tools": read.tools}
        line["renders_back"] = read.renders_back
        file.write(msgspec.json.encode(line).decode() + "\n")
        num_rows += 1
        num_changed += not read.renders_back
    return num_rows, num_changed


def open_chatml(folder: Path, renderer: Mapping[str, str | bool | int]) -> Chatml:
    """The turns of the model in `folder`. Raises ConfigError when its tokenizer is not of the ChatML family."""
    from qwengyre.gateway.rendering import Rendering  # slow to import, and Parquet needs none of it
    from qwengyre.gateway.seen import turn_of

    with named_as("--renderer", "gateway.renderer"):
        rendering = Rendering.from_folder(folder, renderer)
    start, end = (rendering.tokenizer.convert_tokens_to_ids(marker) for marker in ("<|im_start|>", "<|im_end|>"))
    if not isinstance(start, int) or not isinstance(end, int):
        raise ConfigError("this tokenizer has no <|im_start|> and <|im_end|>: export Parquet instead", file=str(folder))

    def parse(ids: list[int], tools: list[dict[str, Any]]) -> Turn:
        return turn_of([*ids, end], rendering.parser(str, (), tools))

    return Chatml(start, end, rendering.tokenizer.decode, parse, rendering.render_finished)
