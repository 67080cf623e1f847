"""Trials of the Harbor of tests (`tests/fake_harbor`), by the real trial host and this Python."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from qwengyre.core.ids import LocalPath
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harbor.config import HarborConfig
from qwengyre.sandbox.harbor.launcher import HarborLauncher, TrialFolders
from qwengyre.sandbox.harness import GatewayAddress
from qwengyre.sandbox.task import Task
from qwengyre.testing.sandbox_kit import Kit, SandboxKind

SEPARATE = 'environment_mode = "separate"\n'


def install(fake: Path, site: Path, version: str = "0.26.0") -> Path:
    """A folder of packages in which the Harbor of tests is installed as this version."""
    shutil.copytree(fake, site, ignore=shutil.ignore_patterns("__pycache__"))
    information = site / f"harbor-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: harbor\nVersion: {version}\n")
    return site


class HarborKit(Kit):
    """A `Kit` whose executions are trials."""

    def __init__(self, folder: Path, fake: Path):
        super().__init__(folder)
        self.site = install(fake, folder / "site")
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.harbor = HarborConfig(
            python=LocalPath(sys.executable),
            agent="probe",
            environment="here:Here",
            environment_kwargs={"marks": str(self.marks)},
            path=(LocalPath(str(self.site)),),
        )
        self.max_agents = 64

    def task(self, instruction: str, test_sh: str = "", *, toml: str = "", files: dict[str, str] | None = None) -> Task:
        given = {"test_sh": test_sh} if test_sh else {}
        return super().task(instruction, **given, toml=SEPARATE + toml, files=files)

    @contextlib.asynccontextmanager
    async def runs(self, config: HarnessConfig, gateway: GatewayAddress) -> AsyncIterator[SandboxKind]:
        folders = TrialFolders(self.folder / "work", self.folder / "failed", None, self.folder / "trial-host.log")
        config = msgspec.structs.replace(config, command=())
        async with HarborLauncher(self.harbor, config, [gateway], folders, max_agents=self.max_agents) as launcher:
            yield launcher

    def with_harbor(self, **changes: Any) -> None:
        self.harbor = msgspec.structs.replace(self.harbor, **changes)
