"""`qwengyre config`: the run file's keys, and whether a run file is good."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from qwengyre.cli.output import say, say_data
from qwengyre.config.dump import dump_toml
from qwengyre.config.dump import explain as explain_struct
from qwengyre.core.errors import QwenGyreError
from qwengyre.runtime.notes import size_of, worth_knowing
from qwengyre.runtime.run_config import RunConfig, read_run
from qwengyre.sim.workload import Workload

WORKLOAD: Final = "workload"
"""Its file is one of its own, no table of the run file."""
COMMANDS: Final = {
    "explain": ("qwengyre.cli.config:explain", "Print every key with its meaning, type and default."),
    "check": ("qwengyre.cli.config:check", "Find all that is wrong with a run before it is started."),
}


def explain(
    only: Annotated[
        str,
        typer.Argument(
            metavar="TABLE-OR-KEY",
            help="Only this: scheduler, scheduler.steps, or steps, wherever it is; workload: a workload's keys.",
        ),
    ] = "",
) -> None:
    """Print every key of a run file, or of a workload that `simulate` and `plan` read, with its meaning, type and default."""
    say_data(explain_struct(Workload) if only == WORKLOAD else explain_struct(RunConfig, only))


def check(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration as resolved, too.")] = False,
) -> None:
    """Say all that is wrong with a run file, its tasks, its policy and its harness, without starting a run; else what is worth knowing.

    The harness is looked for inside a sandbox, but not run.
    """
    from qwengyre.runtime.check import mistakes_in

    reading = read_run(run_file, overrides or [])
    config = reading.value
    if show and config is not None:
        say_data(dump_toml(config))
    mistakes: list[QwenGyreError] = list(reading.mistakes)
    if config is not None:
        wrong = {mistake.key for mistake in reading.mistakes}  # of a key that is wrong, its default says nothing
        found = mistakes_in(config, with_model=True)
        mistakes += [mistake for mistake in found if (key := getattr(mistake, "key", None)) is None or key not in wrong]
    if len(mistakes) > 1:
        raise ExceptionGroup(str(run_file), mistakes)
    for mistake in mistakes:
        raise mistake
    assert config is not None, "what cannot be read has a mistake"
    say(f"{run_file}: ok\n  {size_of(config)}")
    for note in worth_knowing(config):
        say(f"  note: {note}")
