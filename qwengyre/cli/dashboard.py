"""`qwengyre dashboard`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError

NICENESS = 10
"""A run beside it comes first: this process takes the processor when nobody else wants it."""


def dashboard(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="A folder of runs, or one run.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.")] = 8420,
) -> None:
    """Look at runs in the browser while they go on: curves, cells, every execution and what the agent said in it. Ends with Ctrl-C.

    It reads what runs record and changes nothing. The address that it prints holds a token: other users of this machine, and other pages
    in your browser, see nothing.
    """
    if not runs.is_dir():
        raise ConfigError("this folder does not exist: name the folder that your runs lie in", file=str(runs), key="RUNS_DIR")
    from qwengyre.dashboard.server import HOST, dashboard_app, listen, serve

    listener = listen(port)
    token = secrets.token_urlsafe(16)
    say(f"http://{HOST}:{listener.getsockname()[1]}/?token={token}  shows {runs}; Ctrl-C ends it")
    os.nice(NICENESS)
    serve(dashboard_app(runs, token=token), listener)
