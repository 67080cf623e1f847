"""The dashboard: the runs of a folder in the browser, read from their journals while they go on. Changes nothing."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

import qwengyre
from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.dashboard import config_pages, execution_pages, run_pages, task_pages
from qwengyre.dashboard.compare_pages import compare_page
from qwengyre.dashboard.frame import STATIC, render, static_file
from qwengyre.dashboard.guard import Guard
from qwengyre.dashboard.open_run import OpenRun, RunsDir
from qwengyre.telemetry.summary import read_summary

HOST: Final = "127.0.0.1"

RUN_PAGES: Final[dict[str, Callable[[OpenRun, Request], str]]] = {
    "": lambda run, request: run_pages.overview_page(run),
    "executions": lambda run, request: run_pages.executions_page(run, request.query_params),
    "executions/{execution}": lambda run, request: execution_pages.execution_page(
        run, request.path_params["execution"], request.query_params
    ),
    "executions/{execution}/calls/{call}": lambda run, request: execution_pages.tokens_page(
        run, request.path_params["execution"], request.path_params["call"], request.query_params
    ),
    "executions/{execution}/file": lambda run, request: execution_pages.file_page(
        run, request.path_params["execution"], request.query_params
    ),
    "tasks": lambda run, request: task_pages.tasks_page(run, request.query_params),
    "task": lambda run, request: task_pages.task_page(run, request.query_params),
    "search": lambda run, request: run_pages.search_page(run, request.query_params),
    "config": lambda run, request: config_pages.config_page(run),
    "logs": lambda run, request: config_pages.logs_page(run, request.query_params),
    "groups/{group}": lambda run, request: run_pages.group_page(run, request.path_params["group"]),
}
"""Path below a run -> what draws its page."""


def dashboard_app(path: Path, *, token: str = "", names: Collection[str] = ()) -> Guard:
    """The pages of the runs in the folder `path`, or of the one run that it is.

    With a `token` all ask for it: `/?token=...` once, which leaves a cookie. `names`: what other machines may call this one.
    """
    runs = RunsDir(path)

    def all_runs(request: Request) -> Response:
        found = runs.found()
        if runs.is_single and found:
            return RedirectResponse(f"/run/{found[0].name}/", status_code=303)
        return HTMLResponse(run_pages.runs_page(runs))

    def summary(request: Request) -> Response:
        run = runs.open(request.path_params["run"])
        if read_summary(run.folder.summary) is None:
            return JSONResponse({"detail": "no step has ended yet"}, status_code=404)
        return Response(run.folder.summary.read_bytes(), media_type="application/json")

    def compare(request: Request) -> Response:
        return HTMLResponse(compare_page(runs, [name for name in request.query_params.getlist("run") if name]))

    def static(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in STATIC:
            return PlainTextResponse("there is no such file\n", status_code=404)
        return Response(static_file(name), media_type=STATIC[name])

    routes = [
        Route("/", all_runs),
        Route("/compare", compare),
        Route("/static/{file}", static),
        Route("/run/{run}/summary.json", summary),
    ]
    routes += [Route(f"/run/{{run}}/{path}", _answer(runs, draw)) for path, draw in RUN_PAGES.items()]
    return Guard(Starlette(routes=routes, exception_handlers={QwenGyreError: _refused, 404: _not_found}), token, names)


def _answer(runs: RunsDir, draw: Callable[[OpenRun, Request], str]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        run = runs.open(request.path_params["run"])
        tag = _tag(run, request)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        body = draw(run, request)
        # A page that is still being read changes without its files.
        return HTMLResponse(body, headers={"etag": tag} if run.is_read else {})

    return answer


def _tag(run: OpenRun, request: Request) -> str:
    """Equal for equal pages: by the address, and by how far the files of the run have come."""
    folder = run.folder
    files = (folder.metrics, folder.summary, folder.controller_journal, *folder.gateway_journals, folder.trained_journal)
    sizes = [(found.st_size, found.st_mtime_ns) for found in (os.stat(file) for file in files if file.exists())]
    known = (qwengyre.__version__, request.url.path, request.url.query, sizes, run.is_running)
    return f'"{hashlib.sha256(repr(known).encode()).hexdigest()[:24]}"'


def _refused(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, ConfigError) else 500
    return _problem("This cannot be shown", str(error), status)


def _not_found(request: Request, error: Exception) -> Response:
    return _problem("There is no such page", request.url.path, 404)


def _problem(heading: str, message: str, status: int) -> Response:
    page = render("problem.html", title=heading, crumbs=[], tabs=[], live_s=0, heading=heading, message=message)
    return HTMLResponse(page, status_code=status)


def listen(port: int, host: str = HOST) -> socket.socket:
    """A socket that listens on this machine only, or on another address of it; port 0 takes any free one.

    Raises ConfigError when it is taken, or when `host` is not an address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"{host!r} is not an address of this machine ({error.strerror})", key="--host") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address[0], port))
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
