"""How every bench speaks: results as JSON where asked, everything else to stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

STDOUT: Final = "-"

JsonTarget = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is standard output.")
]


def say(line: str = "") -> None:
    """A line for people."""
    print(line, file=sys.stderr, flush=True)


def write_json(target: str | None, found: object) -> None:
    """Write `found` (Structs, dicts, lists) to a file, or to standard output for "-"; None writes nothing."""
    if target is None:
        return
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    if target == STDOUT:
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
