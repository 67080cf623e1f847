"""The contract of launchers, for the one that is always there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qwengyre.launchers.local import LocalLauncher
from tests.contract.launchers import DEADLINE_S, LauncherContract

pytestmark = pytest.mark.integration


class TestLocalLauncher(LauncherContract):
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
