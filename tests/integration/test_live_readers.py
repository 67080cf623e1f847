"""Every command that reads a run reads one that is going on, at any moment of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.dashboard.server import dashboard_app
from tests.integration.run_kit import RunKit

pytestmark = pytest.mark.integration

NOT_YET = (
    "not the folder of a run",
    "no execution 'e000000-0' was recorded; there are: none yet",
    "no rollout group of this run was trained on yet",
    "this run has no evaluation to compare yet",
)
"""What a command may say of a run that has not come far: a word, never a traceback."""


def commands(run: Path, out: Path) -> dict[str, list[str]]:
    return {
        "list": ["inspect", str(run), "--json"],
        "table": ["inspect", str(run)],
        "tree": ["inspect", str(run), "--execution", "e000000-0"],
        "export": ["export", str(run), "--out", str(out / "rows.parquet")],
        "chat": ["export", str(run), "--out", str(out / "rows.jsonl")],
        "report": ["report", str(run)],
        "picture": ["report", str(run), "--out", str(out / "run.svg")],
        "simulate": ["simulate", "--from", str(run), "--seeds", "1", "--policy", "elastic"],
    }


def test_every_reader_works_at_any_moment_of_a_live_run(tmp_path: Path):
    kit = RunKit(tmp_path, steps=3)
    process = kit.start()
    kit.wait_until(kit.has_begun, process)
    run = kit.run_folder().path
    succeeded: Counter[str] = Counter()
    saw_open = 0
    while process.poll() is None:
        for name, words in commands(run, tmp_path).items():
            result = CliRunner().invoke(application(words), words)
            if result.exit_code == 0:
                succeeded[name] += 1
            else:
                assert isinstance(result.exception, SystemExit), f"{words}: {result.exception!r}\n{result.output}"
                assert any(words in result.output for words in NOT_YET), result.output
            if name == "list":
                saw_open += '"end":"open"' in result.output
        page = TestClient(dashboard_app(run)).get("/")
        assert page.status_code == 200, page.text
    assert process.returncode == 0, kit.output()
    assert saw_open and min(succeeded[name] for name in commands(run, tmp_path) if name != "simulate"), (saw_open, succeeded)
