"""A whole run whose executions are trials: `sandbox.kind = "harbor"`, with the Harbor of tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qwengyre.core.records import End, Validity
from qwengyre.testing.harbor_kit import SEPARATE, install
from tests.integration.run_kit import HARNESS, RunKit, executions_done, summary

pytestmark = pytest.mark.integration
FAKE_HARBOR = Path(__file__).parents[1] / "fake_harbor"


class HarborRun(RunKit):
    """The tiny run, its harness as what an agent of Harbor's is told to do."""

    def __init__(self, folder: Path, **settings: int):
        super().__init__(folder, **settings)
        site = install(FAKE_HARBOR, folder / "site")
        sandbox = f"""
[sandbox]
kind = "harbor"

[sandbox.harbor]
python = "{sys.executable}"
agent = "probe"
agent_env = {{ TURNS = "2" }}
environment = "here:Here"
path = ["{site}"]
"""
        text = self.run_file.read_text()
        command = next(line for line in text.splitlines() if line.startswith("command = "))
        self.run_file.write_text(text.replace(f"{command}\n", "").replace('isolation = "none"\n', "") + sandbox)

    def task(self, folder: Path, *given: str) -> None:
        super().task(folder, *given)
        toml = folder / "task.toml"
        toml.write_text(toml.read_text() + SEPARATE)
        (folder / "instruction.md").write_text(HARNESS.replace("sys.argv[1]", repr(f"Write letters about {folder.name}.")))


def test_it_trains_on_trials(tmp_path: Path):
    folder = HarborRun(tmp_path, steps=2).run()
    assert summary(folder).steps == 2
    done = executions_done(folder)
    assert {(one.outcome.end, one.outcome.validity) for one in done.values()} == {(End.EXITED, Validity.VALID)}
    assert {one.counts.calls for one in done.values()} == {2}
    assert len({one.outcome.score for one in done.values()}) > 1


def test_a_check_names_the_key_that_is_wrong(tmp_path: Path):
    kit = HarborRun(tmp_path)
    process = kit.start("--set", "sandbox.harbor.agent=nobody")
    assert process.wait() != 0
    assert "sandbox.harbor.agent: Agent name nobody is not valid" in kit.output()
