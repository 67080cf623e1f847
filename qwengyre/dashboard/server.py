"""The dashboard of a run in the browser: the report, made anew at each request, while the run goes on."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.core.text import html_text
from qwengyre.dashboard.guard import Guard
from qwengyre.dashboard.page import page
from qwengyre.dashboard.report import report_html
from qwengyre.dashboard.series import run_series
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.summary import read_summary

HOST = "127.0.0.1"


def dashboard_app(folder: RunFolder, *, refresh_s: int = 5, token: str = "") -> Guard:
    """GET / is the report (it reloads itself until the run has ended), GET /summary.json the numbers.

    With a `token` both ask for it: `/?token=...` once, which leaves a cookie.
    """

    def report(request: Request) -> Response:
        run = run_series(folder)
        return HTMLResponse(report_html(run, refresh_s=refresh_s if run.ended is None else None))

    def summary(request: Request) -> Response:
        found = read_summary(folder.summary)
        if found is None:
            return JSONResponse({"detail": "no step has ended yet"}, status_code=404)
        return Response(folder.summary.read_bytes(), media_type="application/json")

    def refused(request: Request, error: Exception) -> Response:
        body = [f"<h1>{html_text(folder.path.name)}</h1><p>{html_text(str(error))}</p>"]
        return HTMLResponse(page("QwenGyre", body, refresh_s=refresh_s), status_code=500)

    pages = Starlette(
        routes=[Route("/", report), Route("/summary.json", summary)],
        exception_handlers={QwenGyreError: refused},
    )
    return Guard(pages, token)


def listen(port: int) -> socket.socket:
    """A socket that listens on this machine only; port 0 takes any free one. Raises ConfigError when it is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(64)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "ports go from 0 to 65535"
        raise ConfigError(f"port {port} cannot be used ({reason}); choose another with --port, 0 takes a free one") from error
    return listener


def serve(app: Guard, listener: socket.socket) -> None:
    """Serve until interrupted."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.run(sockets=[listener])
