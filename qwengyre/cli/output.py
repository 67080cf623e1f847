"""Files that a user asked for: whole or not at all, and a clear word when they cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import typer

from qwengyre.core.errors import ConfigError


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
        typer.echo(text, nl=False)
        return
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path}")
