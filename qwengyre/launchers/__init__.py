"""What starts the cells of a run, watches them and ends them: on this machine, or by Ray on many. See docs/scaling.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qwengyre.launchers.api import CellLauncher
from qwengyre.launchers.local import LocalLauncher

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig


async def open_launcher(config: RunConfig, private: Path, logs: Path) -> CellLauncher:
    """The launcher that the run file names. Raises ConfigError when it cannot be had."""
    if config.runtime.launcher == "ray":
        from qwengyre.launchers.on_ray import RayLauncher

        return await RayLauncher(config.ray, logs, config.runtime.start_timeout_s).open()
    return LocalLauncher(private, logs, config.runtime.start_timeout_s)
