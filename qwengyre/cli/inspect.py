"""`qwengyre inspect`: the executions of a run, or the tree of one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from qwengyre.cli.output import say_data, write_text
from qwengyre.cli.run_context import find_tokenizer, load_harness_rules, open_run, run_settings, text_decoder
from qwengyre.core.errors import ConfigError
from qwengyre.core.records import Role
from qwengyre.core.text import one_line
from qwengyre.dashboard.terminal import SafeConsole
from qwengyre.dashboard.tree_page import tree_page
from qwengyre.dashboard.tree_rows import NodeRow, numbers, short, tree_rows
from qwengyre.recorded.run import Scores
from qwengyre.runtime.records import ExecutionDone
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.harness_rules import HarnessRules
from qwengyre.trajectory.roles import assign_roles, detect_harness
from qwengyre.trajectory.tree import TrajectoryTree

PIPE_WIDTH: Final = 240  # wide enough that no column is cut in a file
_ORIGIN_STYLE = {"context": "bright_black", "trained": "green", "masked": "dark_orange"}


class Column(NamedTuple):
    name: str
    show: Callable[[ExecutionLine], str]
    is_number: bool = False


class ExecutionLine(msgspec.Struct, frozen=True):
    """One execution as listed; also a line of `--json`."""

    execution: str
    attempt: int
    kind: str
    """`train`, `evaluation`, or `` for a gateway that ran alone."""
    version: int | None
    """Policy version at its dispatch."""
    task: str
    reward: float | None
    validity: str
    end: str
    duration_s: float | None
    num_calls: int
    num_distinct_tokens: int
    roles: dict[str, int]
    """Calls by role."""
    harness: str


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder or journal of a gateway.")],
    execution: Annotated[str | None, typer.Option(help="Show the tree of this execution.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Which attempt of it; the latest by default.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the tree as one page that needs no other file.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder to read the tokens as text; the run's own by default.")
    ] = None,
    harness_rules: Annotated[
        Path | None, typer.Option(help="TOML file that tells the roles of a harness; the run's own by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="List as JSON, one execution a line.")] = False,
) -> None:
    """List the executions of a run, or show the tree of one."""
    _refuse_useless(execution, {"--attempt": attempt, "--html": html, "--tokenizer": tokenizer}, as_json)
    found = open_run(run)
    settings = run_settings(found)
    rules = load_harness_rules(settings, harness_rules)
    if execution is None:
        lines = [_line(recorded, found.scores, rules) for recorded in found.last_attempts()]
        lines.sort(key=lambda line: line.execution)
        if as_json:
            for line in lines:
                say_data(msgspec.json.encode(line).decode() + "\n")
        else:
            _print(lambda console: _listing(lines, console))
        return
    recorded = found.find(execution, attempt)
    tree = TrajectoryTree(recorded)
    rows = tree_rows(tree, assign_roles(tree.calls, rules), text_decoder(find_tokenizer(found, settings, tokenizer)))
    line = _line(recorded, found.scores, rules)
    if html is not None:
        write_text(html, tree_page(f"Execution {execution}", _facts(line), rows))
    else:
        _print(lambda console: _rich_tree(line, rows))


def _refuse_useless(execution: str | None, of_one: Mapping[str, object], as_json: bool) -> None:
    """Options that would change nothing are mistakes."""
    if execution is None and (given := next((name for name, value in of_one.items() if value is not None), None)):
        raise ConfigError("this is for the tree of one execution: name it with --execution", key=given)
    if execution is not None and as_json:
        raise ConfigError("this is for the list: leave out --execution", key="--json")


def _print(draw: Callable[[Console], RenderableType]) -> None:
    """On a terminal in its width, else whatever the width."""
    console = SafeConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    console.print(draw(console))


def _line(recorded: CallLog, scores: Scores, rules: tuple[HarnessRules, ...]) -> ExecutionLine:
    opened, tree = recorded.opened, TrajectoryTree(recorded)
    done = scores.done.get(opened.execution)
    if done is not None and done.attempt != opened.attempt:
        done = None
    dispatch = scores.dispatch_of(opened.execution)
    harness = detect_harness(tree.calls, rules)
    return ExecutionLine(
        execution=opened.execution,
        attempt=opened.attempt,
        kind=dispatch.kind if dispatch else "",
        version=dispatch.version if dispatch else None,
        task=done.task if done else "",
        reward=done.outcome.score if done else None,
        validity=done.outcome.validity.value if done else "",
        end=_end(done, recorded.is_closed),
        duration_s=done.outcome.duration_s if done else None,
        num_calls=len(tree.calls),
        num_distinct_tokens=tree.num_distinct_tokens,
        roles=dict(Counter(role.value for role in assign_roles(tree.calls, rules).values())),
        harness=harness.name if harness else "",
    )


def _end(done: ExecutionDone | None, is_closed: bool) -> str:
    if done is not None:
        return done.outcome.end.value
    return "closed" if is_closed else "open"


def _listing(lines: list[ExecutionLine], console: Console) -> Table:
    """A row an execution, whole cells only: columns that find no room on a terminal are left out, the least telling ones first."""
    columns = [column for column in COLUMNS if column.name not in LEFT_OUT_FIRST]
    table, unlimited = _table(lines, columns), console.options.update(max_width=PIPE_WIDTH)
    for name in reversed(LEFT_OUT_FIRST):
        wanted = [column for column in COLUMNS if column in columns or column.name == name]
        wider = _table(lines, wanted)
        if console.is_terminal and console.measure(wider, options=unlimited).maximum > console.width:
            break
        columns, table = wanted, wider
    return table


def _table(lines: list[ExecutionLine], columns: list[Column]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.name, justify="right" if column.is_number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(one_line(column.show(line))) for column in columns))
    return table


def _reward(line: ExecutionLine) -> str:
    return "" if line.reward is None else f"{line.reward:.2f}" if line.validity == "valid" else line.validity


def _roles(line: ExecutionLine) -> str:
    return ", ".join(f"{line.roles[role.value]} {role.value}" for role in Role if role.value in line.roles)


COLUMNS: Final = (
    Column("execution", lambda line: line.execution),
    Column("kind", lambda line: line.kind),
    Column("task", lambda line: line.task),
    Column("version", lambda line: "" if line.version is None else str(line.version), is_number=True),
    Column("reward", _reward, is_number=True),
    Column("calls", lambda line: f"{line.num_calls:,}", is_number=True),
    Column("tokens", lambda line: f"{line.num_distinct_tokens:,}", is_number=True),
    Column("time", lambda line: "" if line.duration_s is None else f"{line.duration_s:.1f} s", is_number=True),
    Column("end", lambda line: line.end),
    Column("calls by role", _roles),
)
LEFT_OUT_FIRST: Final = ("calls by role", "version", "kind", "tokens", "time")


def _facts(line: ExecutionLine) -> str:
    reward = "no reward yet" if line.reward is None else f"reward {line.reward:.3f} ({line.validity})"
    time = f", {line.duration_s:.1f} s" if line.duration_s is not None else ""
    parts = [line.task, reward, f"{line.end}{time}", f"{line.num_calls:,} calls", f"{line.num_distinct_tokens:,} distinct tokens"]
    if line.harness:
        parts.append(f"harness {line.harness}")
    return " · ".join(one_line(part) for part in parts if part)


def _rich_tree(line: ExecutionLine, rows: list[NodeRow]) -> Tree:
    top = Tree(Text.assemble((line.execution, "bold"), "  ", _facts(line)), guide_style="bright_black")
    branches = {-1: top}
    for row in rows:
        branch = branches[row.level - 1].add(_node_text(row))
        branches[row.level] = branch
        for span in row.spans:
            if span.text:
                preview = span.text if len(span.text) <= 160 else f"{span.text[:110]} … {span.text[-40:]}"
                branch.add(Text(repr(preview)[1:-1], style=_ORIGIN_STYLE[span.origin]))
    return top


def _node_text(row: NodeRow) -> Text:
    calls = (
        ", ".join(map(short, row.calls))
        if len(row.calls) <= 3
        else f"{short(row.calls[0])} … {short(row.calls[-1])} ({len(row.calls)})"
    )
    counts = (("context", row.num_context), ("trained", row.num_trained), ("masked", row.num_masked))
    text = Text(f"[{row.node}] ", style="bright_black")
    text.append(", ".join(role.value for role in row.roles), style="bold")
    for origin, count in counts:
        if count:
            text.append(f"  {count:,} {origin}", style=_ORIGIN_STYLE[origin])
    if row.versions:
        text.append(f"  v{numbers(row.versions)}", style="cyan")
    return text.append(f"  {calls}  {row.cause}", style="bright_black")
