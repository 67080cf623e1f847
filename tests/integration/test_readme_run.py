"""The README's minimal run file, with a model folder that says nothing of its renderer but what it is."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qwengyre.runtime.check import check_run
from qwengyre.runtime.run_config import load_run
from tests.integration.run_kit import HARNESS, RunKit

README = Path(__file__).parents[2] / "README.md"
SMALL = (
    'harness.isolation="none"',
    'harness.env={TURNS="2"}',
    "scheduler.num_cells=1",
    "scheduler.slots_per_cell=4",
    "scheduler.steps=1",
    "scheduler.groups_per_step=1",
    "scheduler.executions_per_group=2",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "policy.max_tokens_per_call=8",
    "engine.kv_blocks=512",
)
"""So that it starts, trains and ends within seconds."""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run file in a folder of its own, with all that it names."""
    kit = RunKit(tmp_path)
    [minimal] = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    for name in ("train", "held-out"):
        target = tmp_path / "tasks" / name
        target.parent.mkdir(exist_ok=True)
        (kit.folder / name).rename(target)
    model = tmp_path / tomllib.loads(minimal)["policy"]["model"]
    model.parent.mkdir(parents=True)
    (kit.folder / "model").rename(model)
    agent = tmp_path / "my-agent"
    agent.write_text(f"#!{sys.executable}\n" + HARNESS.replace("sys.argv[1]", "sys.argv[2]"))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    monkeypatch.chdir(tmp_path)
    assert '"my-agent"' in minimal
    (tmp_path / "minimal.toml").write_text(minimal.replace('"my-agent"', json.dumps(str(agent))))
    return tmp_path / "minimal.toml"


def test_nothing_is_wrong_with_it(run_file):
    check_run(load_run(run_file, SMALL))


@pytest.mark.integration
def test_it_starts_and_keeps_the_renderer_with_its_checkpoint(run_file, tmp_path):
    program = [sys.executable, "-c", "from qwengyre.cli.main import main; main()", "train", str(run_file)]
    overrides = [part for override in SMALL for part in ("--set", override)]
    done = subprocess.run([*program, "--runs-dir", "runs", *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [run] = (tmp_path / "runs").iterdir()
    kept = [file.read_text() for file in (run / "policy" / "renderer.json", *run.glob("checkpoints/step-*/renderer.json"))]
    assert len(kept) >= 2 and all(json.loads(text) == {"name": "qwen3"} for text in kept)
