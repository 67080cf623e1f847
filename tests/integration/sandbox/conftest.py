"""Real harness processes in real sandboxes, started cold and warm."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.testing.sandbox_kit import STARTS, Kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> str:
    return request.param
