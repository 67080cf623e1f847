"""How every bench speaks: results as JSON where asked, everything else to stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from qwengyre.core.errors import ConfigError

STDOUT: Final = "-"


def _with_a_folder(target: str | None) -> str | None:
    """Refuses a file that has no folder before anything is measured."""
    if target not in (None, STDOUT) and not Path(target).parent.is_dir():
        raise typer.BadParameter(f"{Path(target).parent} is no folder")
    return target


JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=_with_a_folder, help="Write the results as JSON; - is standard output."),
]


def say(line: str = "") -> None:
    """A line for people."""
    print(line, file=sys.stderr, flush=True)


def write_json(target: str | None, found: object) -> None:
    """Write `found` (Structs, dicts, lists) to a file, or to standard output for "-"; None writes nothing.

    Raises ConfigError when the file cannot be written.
    """
    if target is None:
        return
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    if target == STDOUT:
        print(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=target) from error
