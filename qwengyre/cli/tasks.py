"""`qwengyre tasks check DIR`: every problem of a folder of tasks, with file and line."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from qwengyre.cli.output import say
from qwengyre.config.load import load
from qwengyre.core.errors import ConfigError
from qwengyre.images.config import SandboxConfig
from qwengyre.sandbox.config import HarnessConfig, Isolation, LimitsConfig
from qwengyre.sandbox.suites.folders import ImportedTask, write_tasks
from qwengyre.sandbox.suites.pull import pull
from qwengyre.sandbox.suites.repositories import nl2repo, terminal_bench
from qwengyre.sandbox.suites.rows import questions, swe_rows
from qwengyre.sandbox.task import Task, check_tasks
from qwengyre.sandbox.task_images import with_images

FORMATS = ("terminal-bench", "swe-rows", "nl2repo", "questions")

COMMANDS = {
    "check": ("qwengyre.cli.tasks:check", "Validate a folder of tasks; say what is wrong, file and line."),
    "pull": ("qwengyre.cli.tasks:pull_suite", "Get tasks from a git address, a folder or an index of suites."),
    "import": ("qwengyre.cli.tasks:import_suite", "Write tasks of another format as task folders."),
}


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="One task, or a folder of tasks.")],
    solve: Annotated[
        bool, typer.Option("--solve", help="Score every task untouched, and after its own solution/solve.sh; slow.")
    ] = False,
    isolation: Annotated[str, typer.Option(help="With --solve: `bwrap`, or `none` for solutions that you trust.")] = "bwrap",
    host_programs: Annotated[
        bool, typer.Option("--host-programs", help="Do not get images: tasks will run on the programs of this machine.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of [sandbox], such as sandbox.image=NAME.")
    ] = None,
) -> None:
    """Validate a folder of tasks (Harbor / Terminal-Bench format): print every problem, fail on errors.

    Images that tasks name are fetched, and Dockerfiles built (podman), into the store that runs use; one that cannot be had is an error.
    A warning names something that Harbor honors and this sandbox does not; it does not fail the check.
    """
    tasks, problems = check_tasks(folder)
    sandbox = _sandbox(overrides or [], host_programs)
    tasks, without = with_images(tasks, sandbox, say)
    problems = sorted([*problems, *without])
    for problem in problems:
        say(str(problem))
    num_errors = sum(problem.severity == "error" for problem in problems)
    num_warnings = len(problems) - num_errors
    say(f"{len(tasks)} tasks usable, {num_errors} errors, {num_warnings} warnings")
    num_unsolved = _solve(tasks, isolation) if solve else 0
    if num_errors or num_unsolved:
        raise typer.Exit(1)


def pull_suite(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder, a git address (with #COMMIT), or NAME[@VERSION] in --index.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Where the tasks go; a folder that does not exist.")],
    index: Annotated[Path | None, typer.Option(metavar="FILE", help="Index of suites, as Harbor's registry.json.")] = None,
) -> None:
    """Get a folder of tasks (Harbor / Terminal-Bench format), and say what is wrong with it."""
    say(f"{pull(source, target, index)} tasks in {target}")
    say(f"next: qwengyre tasks check {target} --solve")


def import_suite(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"{', '.join(FORMATS)}.")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder, or a file of JSON lines or Parquet.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Where the task folders go.")],
    command: Annotated[str, typer.Option("--test-command", help="swe-rows: runs tests, and says PASSED or FAILED of each.")] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="nl2repo: a key of [sandbox], such as sandbox.store=DIR."),
    ] = None,
) -> None:
    """Write tasks of another format as task folders. docs/tasks-and-harnesses.md describes each format and has a recipe for it.

    terminal-bench: folders with task.yaml. swe-rows: rows as SWE-bench has them. nl2repo: test_files of NL2RepoBench. questions: rows with
    question and answer, or a checker.
    """
    if form not in FORMATS:
        raise ConfigError(f"{form!r} is not a format: {', '.join(FORMATS)}", key="FORMAT")
    if not source.exists():
        raise ConfigError("does not exist", file=str(source))
    readers: dict[str, Callable[[], Iterator[ImportedTask]]] = {
        "terminal-bench": lambda: terminal_bench(source),
        "swe-rows": lambda: swe_rows(source, command),
        "nl2repo": lambda: nl2repo(source, _sandbox(overrides or [], False)),
        "questions": lambda: questions(source),
    }
    number = 0
    for task in write_tasks(readers[form](), target):
        number += 1
        for warning in task.warnings:
            say(f"{task.name}: warning: {warning}")
    if not number:
        raise ConfigError(f"no task of the format {form} in it", file=str(source))
    say(f"{number} tasks in {target}")
    say(f"next: qwengyre tasks check {target} --solve")


def _sandbox(overrides: list[str], host_programs: bool) -> SandboxConfig:
    """Raises ConfigError."""
    if host_programs:
        overrides = [*overrides, "sandbox.host_programs=true"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as empty:
        return load(empty.name, _OnlySandbox, overrides).sandbox


class _OnlySandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: SandboxConfig = SandboxConfig()


def _solve(tasks: Sequence[Task], isolation: str) -> int:
    """A line a task; how many cannot be learned from."""
    from qwengyre.sandbox.solve import solve

    try:
        kind = msgspec.convert(isolation, Isolation)
    except msgspec.ValidationError:
        raise ConfigError(f"{isolation!r} is neither bwrap nor none", key="--isolation") from None
    limits = LimitsConfig(best_effort=True)  # solutions are of who wrote the task
    config = HarnessConfig(command=("true",), isolation=kind, limits=limits)
    results = [solve(task, config) for task in tasks]
    for result in results:
        solved = "no solution" if result.solved is None else f"solved {result.solved:g}"
        say(f"{result.task}: untouched {result.untouched:g}, {solved}{f': {result.problem}' if result.problem else ''}")
    unsolved = sum(bool(result.problem) for result in results)
    say(f"{len(results) - unsolved} of {len(results)} tasks can be learned from")
    return unsolved
