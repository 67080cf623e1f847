"""kill -9 of the controller, the gateway, a satellite and the core, one at a time in mid-run: nothing that had finished is lost.

`make test-faults`. Each run is small and real: three cells, executions alive, the victim chosen when the second step has ended.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from qwengyre.core.records import End
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.records import RolesChanged, RunBegan, StepFinished
from tests.integration.run_kit import RunKit, children, executions_done, kill, metrics, summary

STEPS = 6
VICTIMS = {
    "gateway": ("qwengyre.gateway",),
    "satellite": ("qwengyre.runtime.cell", "cell-2.json"),
    "core": ("qwengyre.runtime.cell", "cell-0.json"),
}


def in_mid_run(kit: RunKit) -> bool:
    return kit.has_begun() and len(metrics(kit.run_folder(), StepFinished)) >= 2


def expect_a_whole_run(folder: RunFolder, before: dict) -> None:
    """All steps, every execution exactly once, those that had finished unchanged, no client with an error."""
    after = executions_done(folder)
    assert {execution: after[execution] for execution in before} == before
    found = summary(folder)
    assert found.steps == STEPS
    assert found.executions_finished == len(after)
    assert found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4
    wrong = [done for done in after.values() if done.outcome.end is not End.EXITED or done.outcome.exit_code != 0]
    assert wrong == []


@pytest.mark.parametrize("victim", sorted(VICTIMS))
def test_the_run_goes_on_by_itself_after_the_death_of(victim: str, tmp_path: Path):
    kit = RunKit(tmp_path, steps=STEPS, turns=4)
    process = kit.start()
    kit.wait_until(lambda: in_mid_run(kit), process)
    before = executions_done(kit.run_folder())
    [pid] = children(process.pid, VICTIMS[victim])
    kill(pid)
    assert process.wait() == 0, kit.output()
    folder = kit.run_folder()
    expect_a_whole_run(folder, before)
    lost = {change.cell for change in metrics(folder, RolesChanged) if change.role == "lost"}
    assert lost == {"gateway": set(), "satellite": {2}, "core": {0}}[victim]
    assert len(metrics(folder, RunBegan)) == 1


def test_a_resumed_run_goes_on_after_the_death_of_the_controller(tmp_path: Path):
    kit = RunKit(tmp_path, steps=STEPS, turns=4)
    process = kit.start()
    kit.wait_until(lambda: in_mid_run(kit), process)
    kill(process.pid)
    process.wait()
    folder = kit.run_folder()
    before = executions_done(folder)
    kit.run("--resume", str(folder.path))
    expect_a_whole_run(folder, before)
    assert [record.resumed for record in metrics(folder, RunBegan)] == [False, True]


def test_a_full_disk_stops_the_run_with_what_to_do_and_nothing_is_lost(tmp_path: Path):
    kit = RunKit(tmp_path, steps=STEPS, turns=4)
    process = kit.start()
    kit.wait_until(lambda: in_mid_run(kit), process)
    _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, most))
    assert process.wait() == 2, kit.output()
    assert "free some space" in kit.output() and "Traceback" not in kit.output()
    folder = kit.run_folder()
    before = executions_done(folder)
    kit.run("--resume", str(folder.path))
    expect_a_whole_run(folder, before)
