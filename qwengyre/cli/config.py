"""`qwengyre config`: the run file's keys, and whether a run file is good."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from qwengyre.config.dump import dump_toml
from qwengyre.config.dump import explain as explain_struct
from qwengyre.runtime.run_config import RunConfig, load_run

COMMANDS: Final = {
    "explain": ("qwengyre.cli.config:explain", "Print every key with its meaning, type and default."),
    "check": ("qwengyre.cli.config:check", "Find all that is wrong with a run before it is started."),
}


def explain(
    only: Annotated[
        str, typer.Argument(metavar="TABLE-OR-KEY", help="Only this: scheduler, scheduler.steps, or steps, wherever it is.")
    ] = "",
) -> None:
    """Print every key of a run file with its meaning, type and default."""
    typer.echo(explain_struct(RunConfig, only), nl=False)


def check(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
) -> None:
    """Print a run file as resolved, then all that is wrong with it, its tasks, its policy and its harness, without starting a run.

    The harness is looked for inside a sandbox, but not run.
    """
    from qwengyre.runtime.check import check_model, check_run

    config = load_run(run_file, overrides or [])
    typer.echo(dump_toml(config), nl=False)
    check_run(config)
    check_model(config)
    typer.echo(f"{run_file}: nothing wrong was found", err=True)
