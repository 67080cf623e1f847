"""What of a run no harness may see: tests, the records of others, and the secret that their keys are made of."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from qwengyre.core.errors import ConfigError
from qwengyre.sandbox.readable import Private
from qwengyre.sandbox.task import find_task_folders

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig


def private_folders(config: RunConfig, run_folder: Path | None) -> list[Private]:
    """`run_folder` is where the run is or will be, if that is known yet."""
    runs = run_folder.absolute().parent if run_folder else Path("runs").absolute()
    private = [
        Private("the folder that you start in", os.getcwd(), whole=False),
        Private("runs", str(runs), whole=False),
        Private("policy.cache", config.policy.cache),
    ]
    if run_folder:
        private.append(Private("this run", str(run_folder.absolute())))
    for key in ("train", "held_out"):
        if folder := getattr(config.tasks, key):
            private.append(Private(f"tasks.{key}", folder, whole=False))
            with contextlib.suppress(ConfigError):  # a folder without tasks is told as such
                private += [Private(f"tasks.{key}", str(task)) for task in find_task_folders(Path(folder))]
    return private
