"""`qwengyre config`: the run file's keys, and whether a run file is good."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from qwengyre.config.dump import dump_toml
from qwengyre.config.dump import explain as explain_struct
from qwengyre.config.run import RunConfig, load_run
from qwengyre.core.errors import ConfigError

COMMANDS: Final = {
    "explain": ("qwengyre.cli.config:explain", "Print every key with its meaning, type and default."),
    "check": ("qwengyre.cli.config:check", "Load a run file and print it as resolved."),
}


def explain(table: Annotated[str, typer.Argument(help="Only this table, e.g. scheduler.")] = "") -> None:
    """Print every key of a run file with its meaning, type and default."""
    text = explain_struct(RunConfig, table)
    if not text.strip():
        raise ConfigError(f"no such table; there are: {', '.join(RunConfig.__struct_fields__)}", key=table)
    typer.echo(text, nl=False)


def check(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
) -> None:
    """Load a run file, report what is wrong with it, or print it as resolved."""
    typer.echo(dump_toml(load_run(run_file, overrides or [])), nl=False)
