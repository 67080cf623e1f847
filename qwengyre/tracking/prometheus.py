"""The newest numbers of a run as Prometheus text (exposition format 0.0.4), for whoever scrapes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from qwengyre.tracking.api import Cell, Point

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(run: str, points: list[Point], summary: Mapping[str, Cell]) -> str:
    """The last value of each name, as a gauge with the run as its label.

    >>> print(exposition("a", [Point(2, True, {"train/loss": 0.5}), Point(3, True, {"train/loss": 0.25})], {"summary/note": "x"}), end="")
    # TYPE qwengyre_train_loss gauge
    qwengyre_train_loss{run="a"} 0.25
    # TYPE qwengyre_train_step gauge
    qwengyre_train_step{run="a"} 3
    """
    newest: dict[str, float] = {}
    for point in points:
        newest |= point.values
        if point.has_step and any(name.startswith("train/") for name in point.values):
            newest["train/step"] = float(point.step)
    newest |= {name: float(value) for name, value in summary.items() if isinstance(value, (int, float))}
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name in sorted(newest):
        metric = "qwengyre_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{label}"}} {newest[name]:.10g}']
    return "\n".join(lines) + "\n"


def serve(address: str, text: Callable[[], str]) -> ThreadingHTTPServer:
    """Answer GET /metrics at `host:port` in threads, with what `text` says then. Raises OSError when the address cannot be had."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] in ("/", "/metrics")
            body = text().encode() if found else b"only /metrics is here\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape is no news."""

    host, _, port = address.rpartition(":")
    server = ThreadingHTTPServer((host.strip("[]"), int(port)), Page)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
    return server
