"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("qwengyre", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("qwengyre")
"""A slow machine is no failure."""
