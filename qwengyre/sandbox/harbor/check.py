"""Prove, before anything is dispatched, that Harbor can run here; say what to change when it cannot."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from qwengyre.core.errors import ConfigError
from qwengyre.sandbox.harbor.config import HarborConfig
from qwengyre.sandbox.harbor.launcher import NO_SEPARATE_VERIFIER
from qwengyre.sandbox.harbor.trial_process import TrialHost
from qwengyre.sandbox.task import Task


def check_harbor(config: HarborConfig) -> str:
    """Start a trial host with the configured agent and environment, and end it; the version of Harbor.

    Raises ConfigError with the key that is wrong, SandboxError when the interpreter dies.
    """
    if not os.access(config.python, os.X_OK) or os.path.isdir(config.python):
        raise ConfigError(
            f"{config.python} is no program: name the Python of an environment that has Harbor", key="sandbox.harbor.python"
        )
    for folder in config.path:
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder} is not a folder", key="sandbox.harbor.path")

    async def look(log: Path) -> str:
        host = TrialHost(config, log)
        await host.open()
        await host.close()
        return host.version

    with tempfile.TemporaryDirectory(prefix="qwengyre-check-") as work:
        return asyncio.run(look(Path(work) / "log"))


def mistakes_with_harbor(tasks: Iterable[Task], config: HarborConfig) -> Iterator[ConfigError]:
    """What is wrong with tasks that Harbor is to run."""
    for task in tasks:
        where = str(Path(task.folder) / "task.toml")
        if not task.has_separate_verifier:
            yield ConfigError(f"{task.name} cannot be trusted with a reward: {NO_SEPARATE_VERIFIER}", file=where)
        if task.wanted_image is None and ":" not in config.environment:
            yield ConfigError(
                f"{task.name} has no image that Harbor could run it on: write environment/Dockerfile, or docker_image in [environment]",
                file=where,
            )
