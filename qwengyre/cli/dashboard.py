"""`qwengyre dashboard`."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError

NICENESS = 10
"""A run beside it comes first: this process takes the processor when nobody else wants it."""
EVERYWHERE = ("0.0.0.0", "::")


def dashboard(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="A folder of runs, or one run.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8420,
    demo: Annotated[bool, typer.Option("--demo", help="Show a recorded run: nothing has to be trained for it.")] = False,
    host: Annotated[
        str, typer.Option(help="Address of this machine to listen on, for others to look, too; the token lets them in.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(help="What others call this machine in their address bar, if not its address or host name."),
    ] = None,
) -> None:
    """Watch runs in the browser: curves, cells, every execution and what the agent said in it. Ends with Ctrl-C.

    It reads what runs record and changes nothing. The address that it prints holds a token: other users of this machine, and other pages
    in your browser, see nothing. It answers only this machine unless --host says otherwise; what goes over a network is not encrypted, so
    prefer `ssh -L 8420:127.0.0.1:8420`.
    """
    if not demo and not runs.is_dir():
        hint = "name the folder that your runs lie in, or look at a recorded run with --demo"
        raise ConfigError(f"this folder does not exist: {hint}", file=str(runs), key="RUNS_DIR")
    from qwengyre.dashboard.demo import unpack_demo
    from qwengyre.dashboard.server import HOST, dashboard_app, listen, serve

    with ExitStack() as scratch:
        shown = unpack_demo(Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="qwengyre-demo-")))) if demo else runs
        listener = listen(port, host)
        token = secrets.token_urlsafe(16)
        names = _names(host, name or ()) if host != HOST else ()
        where = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        say(
            f"http://{where}:{listener.getsockname()[1]}/?token={token}  shows {'a recorded run' if demo else runs}; Ctrl-C ends it"
        )
        os.nice(NICENESS)
        serve(dashboard_app(shown, token=token, names=names), listener)


def _names(host: str, given: list[str] | tuple[()]) -> frozenset[str]:
    """What others may call this machine: its host names, the address that it listens on, and what the user says."""
    own = {socket.gethostname(), socket.getfqdn(), *given}
    if host not in EVERYWHERE:
        own.add(host)
    return frozenset(one.lower() for one in own)
