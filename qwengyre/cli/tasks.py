"""`qwengyre tasks check DIR`: every problem of a folder of tasks, with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.output import say
from qwengyre.sandbox.task import check_tasks

COMMANDS = {"check": ("qwengyre.cli.tasks:check", "Validate a folder of tasks; say what is wrong, file and line.")}


def check(folder: Annotated[Path, typer.Argument(metavar="DIR", help="One task, or a folder of tasks.")]) -> None:
    """Validate a folder of tasks (Harbor / Terminal-Bench format): print every problem, fail on errors.

    A warning names something that Harbor honors and this sandbox does not; it does not fail the check.
    """
    tasks, problems = check_tasks(folder)
    for problem in problems:
        say(str(problem))
    num_errors = sum(problem.severity == "error" for problem in problems)
    num_warnings = len(problems) - num_errors
    say(f"{len(tasks)} tasks usable, {num_errors} errors, {num_warnings} warnings")
    if num_errors:
        raise typer.Exit(1)
