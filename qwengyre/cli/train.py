"""`qwengyre train`."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from qwengyre.cli.output import say, say_progress
from qwengyre.config.dump import dump_toml
from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.dashboard.terminal import SafeConsole
from qwengyre.runtime.recovery import changes_of, key_of
from qwengyre.runtime.run_config import RunConfig, load_run, resolved_changes
from qwengyre.scheduler.events import CHANGEABLE
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import has_finished

CHANGEABLE_KEYS: Final = tuple(key_of(name) for name in CHANGEABLE)


def train(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="The run file; `qwengyre config explain` lists its keys.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue the run in this folder, after any kind of stop.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. scheduler.steps=20.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
) -> None:
    """Train an agent: dispatch tasks to a harness, learn from what it did.

    The run folder gets the config as resolved, journals, metrics, checkpoints, summary.json and report.html.
    """
    os.umask(0o077)  # of every process of the run: prompts, answers and workspaces are its user's alone
    if (run_file is None) == (resume is None):
        raise ConfigError("give either a run file or --resume RUN", file="qwengyre train")
    if resume is not None:
        folder = RunFolder.open_to_resume(resume)
        begun, before = load_run(folder.config), changes_of(folder.controller_journal)
        config = load_run(folder.config, (*before, *(overrides or ())))
        changes = (*before, *resolved_changes(overrides or (), config))
        _refuse_other_decisions(load_run(folder.config, before), config)
        if has_finished(folder) and config.scheduler.steps == load_run(folder.config, before).scheduler.steps:
            from qwengyre.dashboard.report import write_report

            say(f"{folder.path} has finished, there is nothing to resume; its report: {write_report(folder)}{_further(folder)}")
            return
        run_in(config, folder, is_new=False, begun=begun, changes=changes)
    else:
        config = load_run(run_file, overrides or [], say_progress)  # type: ignore[arg-type]
        run_in(config, RunFolder.create(runs_dir, config.runtime.name, dump_toml(config)), is_new=True)


def run_in(
    config: RunConfig,
    folder: RunFolder,
    *,
    is_new: bool,
    on_stderr: bool = False,
    begun: RunConfig | None = None,
    changes: Sequence[str] = (),
) -> None:
    """Run to the end, shown on standard output or error. The folder of a new run that was refused before it began is removed again."""
    from qwengyre.dashboard.live import LiveScreen, outcome_table
    from qwengyre.dashboard.report import write_report
    from qwengyre.runtime.train import train as run  # imports the runtime, only once the input is known to be good

    stop_as_ctrl_c_does()
    try:
        with LiveScreen(SafeConsole(stderr=on_stderr)) as screen:
            summary = run(config, folder, screen, begun=begun, changes=changes)
            write_report(folder)
            if config.scheduler.steps:
                screen.console.print(outcome_table(summary))
            for line in (*([f"note: {summary.note}"] if summary.note else []), f"report: {folder.report}"):
                screen.announce(line)
    except (QwenGyreError, ExceptionGroup):
        if is_new and not folder.has_begun:
            folder.remove()
        raise
    except KeyboardInterrupt:
        say(f"go on with: qwengyre train --resume {shlex.quote(str(folder.path))}", err=True)
        raise


def _further(folder: RunFolder) -> str:
    """How to train on from a finished run: by more steps of it, or by another run."""
    from qwengyre.trainer.checkpoint import checkpoints

    last = max(checkpoints(folder.checkpoints).items(), default=None)
    if last is None:
        return ""
    further = f"\nTo train on with more steps: qwengyre train --resume {shlex.quote(str(folder.path))} --set scheduler.steps=N"
    return f"{further}\nTo train on from its weights, with a new optimizer: qwengyre train {folder.config} --set policy.model={last[1]}"


def _refuse_other_decisions(begun: RunConfig, config: RunConfig) -> None:
    """A resume goes through the decisions of the run again: what they depend on must be as it was, or change by an event. Executions are
    found in the journal of the gateway that they had."""
    fixed = [(table, name) for table in ("scheduler", "evaluation") for name in getattr(begun, table).__struct_fields__]
    for table, name in [*fixed, ("gateway", "processes")]:
        old, new = getattr(getattr(begun, table), name), getattr(getattr(config, table), name)
        if f"{table}.{name}" not in CHANGEABLE_KEYS and old != new:
            message = (
                f"a run is resumed with the value it began with, {old!r}; other values are for a new run. "
                f"What may change: {', '.join(CHANGEABLE_KEYS)}"
            )
            raise ConfigError(message, key=f"{table}.{name}")


def stop_as_ctrl_c_does() -> None:
    """From now on SIGTERM (of a batch system) and SIGHUP (of a terminal that went) end the run in order, unless they are ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in jobs that a script started with `&`
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
