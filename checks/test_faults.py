"""What may happen to a run's processes, harnesses and links, in every phase that matters: nothing finished is lost, no token is wrong.

`make test-faults`. The runs are small and real; `checks/faults/inject.py` strikes in the middle of operations, one fault after the other.
Needs root: links are cut in network namespaces, and a small disk is mounted to be filled.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from checks.faults.evidence import expect_nothing_lost, expect_only_made_tokens, made_tokens, notes
from checks.faults.network import Network, network
from checks.faults.plan import Fault, Noted, Script
from qwengyre.rpc.heartbeat import HEARTBEATS_PER_ANSWER, MISSES_UNTIL_LOST
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.records import RunBegan, StepFinished
from tests.integration.run_kit import RunKit, executions_done, metrics, summary

HEARTBEAT_S = 0.4
DETECTED_WITHIN_S = MISSES_UNTIL_LOST * (HEARTBEATS_PER_ANSWER + 1) * HEARTBEAT_S
SLACK_S = 5.0
"""An answer that comes late is asked for again."""

SMALL_STEPS = ("scheduler.groups_per_step=4", "scheduler.executions_per_group=2")
"""A micro-step for each group: enough that every member of a step claims some."""
TOGETHER = (
    "scheduler.policy=colocate",
    "scheduler.num_standalone=1",
    "scheduler.slots_per_standalone=2",
    "scheduler.steps_per_burst=1",
)
"""All cells train in every step, beside a standalone engine: each phase comes to each of them."""
ONE_BY_ONE = ("scheduler.policy=elastic", "scheduler.steps_per_burst=1")
"""Cells leave one after the other, with calls that move."""

KILLED_TOGETHER = [
    Fault("cell-1", "kill", "rollout"),
    Fault("cell-2", "kill", "EnterTraining"),
    Fault("cell-1", "kill", "BeginStep"),
    Fault("cell-2", "kill", "Compute"),
    Fault("cell-1", "kill", "Reduce"),
    Fault("cell-2", "kill", "EnterRollout"),
    Fault("cell-0", "kill", "BeginStep", at="cell-1"),
    Fault("cell-0", "kill", "Compute"),
    Fault("cell-0", "kill", "Apply"),
    Fault("standalone-0", "kill", "rollout"),
    Fault("standalone-0", "kill", "UpdateWeights"),
    Fault("cell-0", "kill", "Audit"),
]
KILLED_ONE_BY_ONE = [
    Fault("cell-1", "kill", "Move"),
    Fault("gateway", "kill", "rollout"),
    Fault("gateway", "kill", "Move"),
    Fault("cell-2", "kill", "UpdateWeights"),
    Fault("gateway", "kill", "Compute"),
    Fault("cell-0", "kill", "ExposeSnapshot"),
    Fault("cell-0", "kill", "SaveCheckpoint"),
    Fault("gateway", "kill", "Audit"),
]
STALLED = [
    Fault("cell-1", "stall", "rollout"),
    Fault("cell-2", "stall", "Compute"),
    Fault("cell-1", "stall", "Reduce"),
    Fault("cell-2", "stall", "BeginStep"),
    Fault("cell-0", "stall", "Compute"),
    Fault("cell-1", "stall", "EnterRollout"),
    Fault("standalone-0", "stall", "UpdateWeights"),
    Fault("gateway", "stall", "rollout"),
    Fault("gateway", "stall", "Compute"),
    Fault("cell-2", "pause", "Compute"),
    Fault("gateway", "pause", "rollout"),
    Fault("controller", "pause", "rollout"),
]
CUT_OFF = [
    Fault("cell-1", "cut", "rollout"),
    Fault("cell-2", "cut", "BeginStep"),
    Fault("cell-1", "cut", "Reduce"),
    Fault("cell-0", "cut", "Compute"),
    Fault("standalone-0", "cut", "UpdateWeights"),
    Fault("standalone-0", "reset", "rollout"),
]
HARNESSES = [
    Fault("harness", "kill", "rollout"),
    Fault("harness", "reset", "rollout"),
    Fault("evaluator", "kill", "rollout"),
    Fault("harness", "stall", "rollout"),
    Fault("evaluator", "stall", "rollout"),
]
CONTROLLER = [
    Fault("controller", "kill", "EnterTraining"),
    Fault("controller", "kill", "Compute"),
    Fault("controller", "kill", "UpdateWeights"),
    Fault("controller", "kill", "SaveCheckpoint"),
    Fault("controller", "kill", "Audit"),
]


class FaultyRun:
    """A run with faults, from its script to what must hold when it has ended."""

    def __init__(self, folder: Path, faults: Sequence[Fault], *settings: str, steps: int, network: Network | None = None) -> None:
        self.kit = RunKit(folder, steps=steps, turns=3, max_tokens=16)
        self.faults, self.steps = list(faults), steps
        self.made, self.notes = folder / "made", folder / "notes.jsonl"
        self.made.mkdir()
        self._network = network
        self.settings = [
            f"runtime.heartbeat_s={HEARTBEAT_S}",
            *SMALL_STEPS,
            "runtime.collective_timeout_s=5",
            *settings,
        ]

    def run(self, faults: Sequence[Fault], *arguments: str) -> int:
        """The exit code of one life of the controller, in which `faults` strike."""
        script = Script(list(faults), str(self.notes), str(self.made), self._network)
        script_file = self.kit.folder / "script.json"
        script_file.write_bytes(msgspec.json.encode(script))
        given = arguments or (str(self.kit.run_file), "--runs-dir", str(self.kit.folder / "runs"), *self._set())
        with open(self.kit.folder / "output.log", "ab") as output:
            command = [sys.executable, "-m", "checks.faults.inject", str(script_file), "train", *given]
            return subprocess.run(command, stdout=output, stderr=output).returncode

    def _set(self) -> list[str]:
        return [word for setting in self.settings for word in ("--set", setting)]

    def noted(self, event: str) -> dict[str, Noted]:
        return {note.fault: note for note in notes(self.notes) if note.event == event}

    def expect_whole(self) -> RunFolder:
        """All faults struck, all steps done, nothing lost, no wrong token, log-probs exact."""
        assert sorted(self.noted("struck")) == sorted(fault.name for fault in self.faults), "some faults found no place"
        folder = self.kit.run_folder()
        found = summary(folder)
        assert found.steps == self.steps
        expect_nothing_lost(folder)
        assert found.executions_finished == len(executions_done(folder))
        assert found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4
        assert expect_only_made_tokens(folder, made_tokens(self.made)) > 0
        return folder

    def expect_found_in_time(self) -> None:
        """Who stalls or is cut off is lost within the bound; who pauses is not lost at all."""
        struck, lost = self.noted("struck"), self.noted("lost")
        for fault in self.faults:
            if fault.how == "pause":
                assert fault.name not in lost
            if fault.how in ("stall", "cut") and fault.victim.startswith(("cell", "standalone")):
                assert lost[fault.name].who == fault.victim
                seconds = lost[fault.name].at - struck[fault.name].at
                assert seconds <= DETECTED_WITHIN_S + SLACK_S, f"{fault.name}: lost after {seconds:.1f} s"


@pytest.fixture
def links() -> Iterator[Network]:
    with network(["cell-0", "cell-1", "cell-2", "standalone-0"]) as made:
        yield made


def expect_one_life(run: FaultyRun) -> None:
    assert run.run(run.faults) == 0, run.kit.output()
    folder = run.expect_whole()
    assert len(metrics(folder, RunBegan)) == 1


def test_processes_killed_while_all_cells_train_together(tmp_path: Path):
    expect_one_life(FaultyRun(tmp_path, KILLED_TOGETHER, *TOGETHER, steps=30))


def test_processes_killed_while_cells_change_roles_one_by_one(tmp_path: Path):
    expect_one_life(FaultyRun(tmp_path, KILLED_ONE_BY_ONE, *ONE_BY_ONE, steps=24))


def test_processes_that_stall_are_found_and_those_that_pause_are_left_alone(tmp_path: Path):
    run = FaultyRun(tmp_path, STALLED, *TOGETHER, steps=30)
    expect_one_life(run)
    run.expect_found_in_time()


def test_cells_whose_link_is_cut_are_found_and_dropped_connections_cost_nothing(tmp_path: Path, links: Network):
    run = FaultyRun(tmp_path, CUT_OFF, *TOGETHER, "transfer.transport=tcp", "transfer.deadline_s=5", steps=20, network=links)
    expect_one_life(run)
    run.expect_found_in_time()


def test_harnesses_and_evaluators_that_die_or_stall_end_as_data(tmp_path: Path):
    run = FaultyRun(tmp_path, HARNESSES, *ONE_BY_ONE, "harness.timeout_s=20", "harness.verifier_timeout_s=5", steps=8)
    expect_one_life(run)


def test_a_controller_killed_in_any_phase_is_resumed(tmp_path: Path):
    run = FaultyRun(tmp_path, CONTROLLER, *ONE_BY_ONE, steps=8)
    assert run.run(run.faults[:1]) == -9, run.kit.output()
    path = str(run.kit.run_folder().path)
    for fault in run.faults[1:]:
        before = executions_done(run.kit.run_folder())
        assert run.run([fault], "--resume", path) == -9, run.kit.output()
        after = executions_done(run.kit.run_folder())
        assert {execution: after[execution] for execution in before} == before
    assert run.run([], "--resume", path) == 0, run.kit.output()
    folder = run.expect_whole()
    assert len(metrics(folder, RunBegan)) == 1 + len(run.faults)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    runs = tmp_path / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(runs)], check=True)
    yield runs
    subprocess.run(["umount", str(runs)], check=True)


def test_a_full_disk_stops_the_run_with_what_to_do_and_nothing_is_lost(tmp_path: Path, small_disk: Path):
    kit = RunKit(tmp_path, steps=6, turns=4)
    process = kit.start()
    kit.wait_until(lambda: kit.has_begun() and len(metrics(kit.run_folder(), StepFinished)) >= 2, process)
    filler = kit.run_folder().path / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)
    assert process.wait() == 2, kit.output()
    assert "free some" in kit.output() and "Traceback" not in kit.output()
    filler.unlink()
    folder = kit.run_folder()
    before = executions_done(folder)
    kit.run("--resume", str(folder.path))
    after = executions_done(folder)
    assert {execution: after[execution] for execution in before} == before
    assert summary(folder).steps == 6
    expect_nothing_lost(folder)
