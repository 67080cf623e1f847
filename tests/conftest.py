"""Settings of all tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch and numpy are imported. A sum's last digits depend on how many threads share it, and on a machine with other work
threads wait for each other: the tests of engines took ten times as long."""

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("qwengyre", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("qwengyre")
"""A slow machine is no failure."""


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests that are coroutines: the one that the package is written for."""
    return "asyncio"


@pytest.fixture
def prefix() -> Iterator[str]:
    """What the shared memory of one test is called, and of no other that runs on this machine; what is left of it goes afterwards."""
    from qwengyre.transfer.shm import cleanup

    name = f"qg-test-{secrets.token_hex(8)}"
    yield name
    cleanup(name)
