"""The device that is checked, and the figures that are kept. `QWENGYRE_TEST_DEVICE` is cuda, or cpu for the half that needs none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from qwengyre.models.placement import HOST

Note = Callable[..., None]


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of checks that are coroutines: the one that the package is written for."""
    return "asyncio"


@pytest.fixture(scope="session")
def device() -> torch.device:
    if (wanted := os.environ.get("QWENGYRE_TEST_DEVICE", "cuda")) == "cpu":
        return HOST
    if not torch.cuda.is_available():
        pytest.exit(f"torch {torch.__version__} finds no {wanted} device: `make test-gpu DEVICE=cpu` checks what needs none", 2)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def report(device: torch.device) -> Iterator[dict[str, object]]:
    """Written to `QWENGYRE_GPU_REPORT` at the end, beside what ran it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    kept: dict[str, object] = {"device": name, "torch": torch.__version__}
    yield kept
    Path(os.environ.get("QWENGYRE_GPU_REPORT", "gpu-report.json")).write_text(json.dumps(kept, indent=1) + "\n")


@pytest.fixture
def note(report: dict[str, object], request: pytest.FixtureRequest) -> Note:
    """Keep figures of this check."""
    return lambda **figures: report.update({request.node.name: figures})
