"""Results as JSON, where a command is asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from qwengyre.cli.output import say_data
from qwengyre.core.errors import ConfigError

STDOUT: Final = "-"


def _with_a_folder(target: str | None) -> str | None:
    """Refuses a file that has no folder before anything is measured."""
    if target not in (None, STDOUT) and not Path(target).parent.is_dir():
        raise typer.BadParameter(f"{Path(target).parent} is not a folder")
    return target


JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=_with_a_folder, help="Write the results as JSON; - is standard output."),
]


def write_json(target: str | None, found: object) -> None:
    """Write `found` (Structs, dicts, lists) to a file, or to standard output for "-"; None writes nothing.

    Raises ConfigError when the file cannot be written.
    """
    if target is None:
        return
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    if target == STDOUT:
        say_data(text + "\n")
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=target) from error
