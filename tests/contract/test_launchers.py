"""The contract of launchers, for the one that is always there and for the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qwengyre.core.errors import Unreachable
from qwengyre.launchers.local import LocalLauncher
from qwengyre.rpc.client import Client
from qwengyre.testing.runtime import FakeLauncher, FakeLife
from tests.contract.launchers import DEADLINE_S, LauncherContract, ProcessLauncherContract


@pytest.mark.integration
class TestLocalLauncher(ProcessLauncherContract):
    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[LocalLauncher]:
        launcher = LocalLauncher(folder, folder, DEADLINE_S)
        yield launcher
        await launcher.close()

    def program(self, folder: Path) -> str:
        return f"""
import pathlib
from qwengyre.launchers.local import LocalLauncher
async def open():
    folder = pathlib.Path({str(folder)!r})
    return LocalLauncher(folder, folder, {DEADLINE_S})
"""


class TestFakeLauncher(LauncherContract):
    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[FakeLauncher]:
        launcher = FakeLauncher()
        yield launcher
        await launcher.close()

    def strike(self, life: FakeLife) -> None:
        life.end("ended with -9")

    async def wait_gone(self, life: FakeLife) -> None:
        await life.stop()
        with pytest.raises(Unreachable):
            await Client(life.address.control, b"secret").connect(DEADLINE_S)
