"""What starts the cells of a run, watches them and ends them: on this machine, or by Ray on many. See docs/scaling.md."""

from __future__ import annotations

from pathlib import Path

from qwengyre.launchers.api import CellLauncher
from qwengyre.launchers.config import RayConfig
from qwengyre.launchers.local import LocalLauncher


async def open_launcher(name: str, ray: RayConfig, private: Path, logs: Path, start_timeout_s: float) -> CellLauncher:
    """The launcher of this name (`runtime.launcher`). Raises ConfigError when it cannot be had."""
    if name == "ray":
        from qwengyre.launchers.on_ray import RayLauncher

        return await RayLauncher(ray, logs, start_timeout_s).open()
    return LocalLauncher(private, logs, start_timeout_s)
