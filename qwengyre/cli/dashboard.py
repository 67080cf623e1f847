"""`qwengyre dashboard`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.output import say
from qwengyre.telemetry.folder import RunFolder


def dashboard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may be going on.")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.")] = 8420,
    refresh_s: Annotated[int, typer.Option(help="Seconds between two looks while the run goes on.")] = 5,
) -> None:
    """Watch a run in the browser: the report, drawn anew at every look. Ends with Ctrl-C.

    The address that it prints holds a token: other users of this machine, and other pages in your browser, see nothing.
    """
    folder = RunFolder.open(run)
    from qwengyre.dashboard.server import HOST, dashboard_app, listen, serve

    listener = listen(port)
    token = secrets.token_urlsafe(16)
    say(f"http://{HOST}:{listener.getsockname()[1]}/?token={token}  shows {folder.path}; Ctrl-C ends it")
    serve(dashboard_app(folder, refresh_s=refresh_s, token=token), listener)
