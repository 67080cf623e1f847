"""A run's configuration and the logs of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwengyre.core.errors import ConfigError
from qwengyre.dashboard.frame import render
from qwengyre.dashboard.kept_files import read_kept
from qwengyre.dashboard.open_run import OpenRun
from qwengyre.dashboard.run_pages import frame_of

LOG_TAIL_BYTES = 64 << 10
"""Shown of a log: its last lines are why one looks."""


def config_page(run: OpenRun) -> str:
    text = read_kept(run.folder.path, "config.toml")
    return render("config.html", **frame_of(run, "Config", live=False), text=text)


def logs_page(run: OpenRun, given: Mapping[str, str]) -> str:
    names = sorted(path.name for path in run.folder.logs.glob("*.log") if path.is_file() and not path.is_symlink())
    wanted = given.get("name", names[0] if names else "")
    if wanted and wanted not in names:
        raise ConfigError(f"there is no log {wanted!r}", file=run.name)
    text = _tail(run.folder.logs / wanted) if wanted else ""
    return render("logs.html", **frame_of(run, "Logs"), names=names, wanted=wanted, text=text)


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_TAIL_BYTES))
        data = file.read(LOG_TAIL_BYTES)
    return data.decode("utf-8", errors="replace")
