"""Settings of all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch and numpy are imported. A sum's last digits depend on how many threads share it, and on a machine with other work
threads wait for each other: the tests of engines took ten times as long."""

from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("qwengyre", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("qwengyre")
"""A slow machine is no failure."""
