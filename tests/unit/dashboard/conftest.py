from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from qwengyre.bench.made_up_run import MadeUpRun, write_made_up_run
from qwengyre.dashboard.server import dashboard_app


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs of 96 executions: two steps of six groups of eight; the first has two gateways. Not to be written to."""
    runs = tmp_path_factory.mktemp("runs")
    for name, seed, rate, gateways in (("first", 0, 1e-5, 2), ("second", 1, 2e-5, 1)):
        run = MadeUpRun(num_executions=96, num_tasks=6, seed=seed, name=name, learning_rate=rate, num_gateways=gateways)
        write_made_up_run(runs, run)
    return runs


@pytest.fixture
def browser(made_up: Path) -> TestClient:
    return TestClient(dashboard_app(made_up), base_url="http://127.0.0.1:8420")
