"""Where `qwengyre simulate` and `qwengyre plan` take durations from, as arguments: imports nothing that help would wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WorkloadArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="WORKLOAD",
        help="A workload: FILE (JSON or TOML), FILE.json:NAME for one of several, or the name of a built-in one. "
        "Its keys: qwengyre config explain workload.",
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="RUN", help="Take durations from the journal of a run instead of a distribution."),
]
