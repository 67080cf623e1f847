"""`qwengyre COMMAND`: finds the command in a table and imports only that one, so that help is quick and needs no torch."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Annotated, Any, Final

import typer

import qwengyre
from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError, QwenGyreError

Commands = Mapping[str, tuple[str, str]]
"""Name -> ("module:function", one line of help). A target that is itself such a table is a group of commands."""

COMMANDS: Final[Commands] = {
    "init": ("qwengyre.cli.init:init", "Write a run file, tasks and an agent to begin with."),
    "train": ("qwengyre.cli.train:train", "Train an agent: dispatch tasks to a harness, learn from what it did."),
    "evaluate": ("qwengyre.cli.evaluate:evaluate", "Score a policy or a served model on tasks, without training."),
    "run-task": ("qwengyre.cli.run_task:run_task", "Run one execution of one task, and see what the harness does."),
    "gateway": ("qwengyre.cli.gateway:gateway", "Serve an engine to any harness and record every token, without training."),
    "serve": ("qwengyre.cli.gateway:serve", "Serve a model on this processor to any harness, as `gateway` does."),
    "tasks": ("qwengyre.cli.tasks:COMMANDS", "Check task folders."),
    "warmup": ("qwengyre.cli.warmup:warmup", "Make the small policy that a run on a CPU starts from."),
    "runs": ("qwengyre.cli.runs:runs", "List the runs of a folder, and make room on its disk."),
    "images": ("qwengyre.cli.images:images", "List the unpacked images of tasks, and make room on their disk."),
    "inspect": ("qwengyre.cli.inspect:inspect", "List the executions of a run, or show the tree of one."),
    "export": ("qwengyre.cli.export:export", "Write the trajectories of a run as Parquet or SFT data."),
    "export-model": ("qwengyre.cli.export_model:export_model", "Write a policy of a run as a folder that any tool opens."),
    "dashboard": ("qwengyre.cli.dashboard:dashboard", "Watch a run in the browser."),
    "report": ("qwengyre.cli.report:report", "Write the report of a run, or compare several."),
    "track": ("qwengyre.cli.track:track", "Send a run, or what is left of it, to trackers."),
    "simulate": ("qwengyre.cli.simulate:simulate", "Time of elastic, Colocate and Async for a workload, on a virtual clock."),
    "plan": ("qwengyre.cli.plan:plan", "Find the best cells, mu and phi for a workload."),
    "config": ("qwengyre.cli.config:COMMANDS", "Explain the keys of a run file, or check one."),
    "bench": ("qwengyre.bench:COMMANDS", "Measure parts of the system."),
    "docs": ("qwengyre.cli.docs:docs", "Read the documentation of this version."),
    "doctor": ("qwengyre.cli.doctor:doctor", "Check what this machine offers and what is missing."),
}
USER_ERROR: Final = 2
INTERRUPTED: Final = 130
REFUSALS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""What a machine refuses whoever asks: a word for the user, no bug of ours."""


def main() -> None:
    """Entry point of the `qwengyre` program."""
    sys.excepthook = _print_traceback
    application(sys.argv[1:])()


def application(arguments: list[str]) -> typer.Typer:
    """The program with the one command that `arguments` name imported; all others know only their line of help."""
    app = typer.Typer(
        help=qwengyre.__doc__,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    words = [word for word in arguments if not word.startswith("-")]
    _register(app, COMMANDS, words, show_traceback="--debug" in arguments[: _first_word(arguments)])
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        say(f"qwengyre {qwengyre.__version__}")
        raise typer.Exit()


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options that stand before the command. `--version` is eager: it needs no command."""


def _register(app: typer.Typer, commands: Commands, words: list[str], show_traceback: bool) -> None:
    wanted = words[0] if words else None
    for name, (target, summary) in commands.items():
        loaded = _load(target) if name == wanted else _not_loaded
        if isinstance(loaded, Mapping):
            group = typer.Typer(help=summary, no_args_is_help=True)
            _register(group, loaded, words[1:], show_traceback)
            app.add_typer(group, name=name)
        else:
            help_text = None if name == wanted else summary
            app.command(name, help=help_text, short_help=summary, no_args_is_help=False)(_guarded(loaded, show_traceback))


def _load(target: str) -> Callable[..., Any] | Commands:
    module, _, name = target.partition(":")
    loaded: Callable[..., Any] | Commands = getattr(importlib.import_module(module), name)
    return loaded


def _not_loaded() -> None:
    """Stands for a command that these arguments do not name."""


def _first_word(arguments: list[str]) -> int:
    return next((index for index, word in enumerate(arguments) if not word.startswith("-")), len(arguments))


def _guarded(function: Callable[..., Any], show_traceback: bool) -> Callable[..., Any]:
    """Errors that a user can act on become a line each on stderr; Ctrl-C ends without a traceback."""

    @functools.wraps(function)
    def guarded(*args: object, **kwargs: object) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            _print_error("stopped")
            raise typer.Exit(INTERRUPTED) from None
        except (QwenGyreError, ExceptionGroup, OSError) as error:
            mistakes = user_errors(error)
            if show_traceback or not mistakes:
                raise
            for mistake in mistakes:
                _print_error(f"error: {mistake}")
            raise typer.Exit(USER_ERROR) from None

    return guarded


def user_errors(error: Exception) -> list[QwenGyreError]:
    """What a user can act on in `error`, task groups opened; none if anything else, a bug of ours, is among them.

    >>> [str(e) for e in user_errors(ExceptionGroup("tasks", [QwenGyreError("port 80 is taken")]))]
    ['port 80 is taken']
    >>> user_errors(ExceptionGroup("tasks", [QwenGyreError("port 80 is taken"), KeyError("bug")]))
    []
    """
    if isinstance(error, ConfigError) and error.mistakes:
        return list(error.mistakes)
    if isinstance(error, QwenGyreError):
        return [error]
    if isinstance(error, OSError) and error.errno in REFUSALS:
        where = f"{error.filename}: " if error.filename else ""
        return [QwenGyreError(f"{where}{os.strerror(error.errno)}")]
    if not isinstance(error, ExceptionGroup):
        return []
    found = [user_errors(inner) for inner in error.exceptions]
    return [mistake for inner in found for mistake in inner] if all(found) else []


def _print_traceback(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """As Python does, but for what an error quotes."""
    say("".join(traceback.format_exception(kind, error, frames)).rstrip("\n"), err=True)


def _print_error(line: str) -> None:
    say(line, err=True, color=typer.colors.RED, bold=True)
