"""What commands say, safe to show whatever is quoted in it; and files that a user asked for, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from qwengyre.core.errors import ConfigError
from qwengyre.core.text import printable


def say(text: str, *, lead: str = "", err: bool = False, color: str | None = None, bold: bool = False) -> None:
    """Lines for people, on standard output or standard error. `lead` is ours, and may be styled."""
    typer.secho(lead + printable(text), err=err, fg=color, bold=bold or None)


def say_progress(line: str) -> None:
    """Progress, on standard error: standard output is for what was asked for."""
    say(line, err=True)


def say_data(text: str) -> None:
    """What a program may read from standard output: as it is, but for a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A file beside `out` to write, which takes its place once it is whole. Raises ConfigError when it cannot be written."""
    is_special = out.exists() and not out.is_file()  # a pipe or /dev/null is written to, never replaced
    part = out if is_special else out.with_name(f".{out.name}.{os.getpid()}")
    try:
        yield part
        if not is_special:
            os.replace(part, out)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"cannot be written: {reason}", file=str(out)) from error
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file and say so, or the standard output for `-`. Raises ConfigError if it cannot be written."""
    if str(path) == "-":
        say_data(text)
        return
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8")
    say(f"wrote {path}")
