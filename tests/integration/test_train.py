"""The whole path through the real program: harness, gateway, tree, step, publish; twice, with a kill between."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.core.records import MicroStep
from qwengyre.journal import read
from qwengyre.recorded.run import RecordedRun
from qwengyre.runtime.gateway_client import gateway_of
from qwengyre.runtime.records import ControllerRecord
from qwengyre.runtime.train import segment_prefix
from qwengyre.scheduler.events import CellLost, CellReturned, Foreseen, Reconfigured
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.records import EvaluationFinished, RunBegan, StepFinished
from qwengyre.trainer import checkpoint
from qwengyre.transfer.shm import SHM_DIR
from tests.integration.run_kit import RunKit, children, executions_done, kill, metrics, summary

pytestmark = pytest.mark.integration


def test_a_run_goes_through_all_stations_and_leaves_everything_promised(tmp_path: Path):
    folder = RunKit(tmp_path, steps=2).run()
    found = summary(folder)
    assert found.steps == 2
    assert found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4
    assert found.score_after is not None and 0 < found.score_after <= 1
    assert found.tokens_recomputed_after_move == 0
    assert found.executions_finished == len(executions_done(folder))
    assert [step.step for step in metrics(folder, StepFinished)] == [1, 2]
    assert [evaluation.version for evaluation in metrics(folder, EvaluationFinished)] == [2]
    for path in (folder.config, folder.report, folder.policy / "tokenizer.json", folder.gateway_journal):
        assert path.is_file()
    assert list(folder.tensorboard.iterdir())
    last = checkpoint.place(folder.checkpoints, 2)
    for model in (last, exported(folder, tmp_path / "policy")):
        assert json.loads((model / "renderer.json").read_text()) == {"name": "qwen3", "enable_thinking": False}
        policy, told = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(model).encode("text")
        saved = load_file(folder.snapshots / "v000002.safetensors")
        assert all(np.array_equal(weight.detach(), saved[name]) for name, weight in policy.named_parameters())


def exported(folder: RunFolder, out: Path) -> Path:
    words = ["export-model", str(folder.path), "--out", str(out)]
    assert CliRunner().invoke(application(words), words).exit_code == 0
    return out


def test_a_run_that_learns_nothing_says_so(tmp_path: Path):
    kit = RunKit(tmp_path, steps=2)
    for test in (tmp_path / "train").glob("*/tests/test.sh"):
        test.write_text("echo 0 > $VERIFIER_DIR/reward.txt\n")
    folder = kit.run("--set", "evaluation.at_end=false")
    assert summary(folder).steps_that_taught_nothing == 2
    assert "step 1 taught the policy nothing: every execution scored 0. Look at" in kit.output(whole=True)
    assert "note: no step taught the policy anything: every execution scored 0." in kit.output()
    assert "No step taught the policy anything" in folder.report.read_text()


def test_cells_of_two_ranks_train_together(tmp_path: Path):
    """Sharded inside the cells, summed shard by shard between them, whole again where others read it."""
    all_train = ("--set", "scheduler.num_cells=2", "--set", "scheduler.policy=colocate")
    folder = RunKit(tmp_path, steps=2).run(*all_train, "--set", "trainer.ranks=2")
    assert summary(folder).max_logprob_gap <= 1e-4
    assert [step.members for step in metrics(folder, StepFinished)] == [(0, 1), (0, 1)]
    first, last = (weights_of(folder, step) for step in (0, 2))
    assert first.keys() == last.keys() and all(first[name].shape == last[name].shape for name in first)
    assert any((first[name] != last[name]).any() for name in first)


def test_a_cell_that_loses_a_rank_is_lost_and_comes_back(tmp_path: Path):
    kit = RunKit(tmp_path, steps=4)
    process = kit.start("--set", "scheduler.num_cells=2", "--set", "trainer.ranks=2")
    kit.wait_until(lambda: kit.has_begun() and bool(metrics(kit.run_folder(), StepFinished)), process)
    cell, *_ = children(process.pid, ("qwengyre.cell.cell",))
    [rank] = children(cell, ("qwengyre.cell.ranks.process",))
    kill(rank)
    assert process.wait() == 0, kit.output()
    events = [record for _, record in read(kit.run_folder().controller_journal, ControllerRecord)]
    [lost] = [event for event in events if isinstance(event, CellLost)]
    assert lost.cell in [event.cell for event in events if isinstance(event, CellReturned)]
    assert {step.step for step in metrics(kit.run_folder(), StepFinished)} == {1, 2, 3, 4}, "the core goes on from its checkpoint"


def test_a_step_whose_loss_is_not_finite_is_not_applied_and_its_data_is_kept(tmp_path: Path):
    """The first step of a burst throws the weights away, so that in the second the distance to the reference overflows."""
    only_training = ("--set", "scheduler.num_cells=1", "--set", "evaluation.at_end=false")
    kit = RunKit(tmp_path, steps=2)
    with_kl = ("--set", "trainer.kl_coefficient=1.0", "--set", "trajectory.keep_zero_advantage=true")
    folder = kit.run("--set", "trainer.learning_rate=1e3", *with_kl, *only_training)
    ruined, after = (weights_of(folder, step) for step in (1, 2))
    assert all(np.array_equal(ruined[name], after[name], equal_nan=True) for name in ruined)
    kept = [msgspec.msgpack.decode(file.read_bytes(), type=MicroStep) for file in (folder.path / "poisoned").iterdir()]
    executions = {execution.execution for micro_step in kept for execution in micro_step.executions}
    told = re.findall(r"Qwen3ForCausalLM, execution (\S+), path \d+: loss is inf", kit.output(whole=True))
    assert told and executions.issuperset(told)


USELESS = {
    "never called": ("--set", 'harness.command=["bash", "-c", "echo nobody called"]'),
    "no score": ("--set", "tasks.train={folder}/broken", "--set", "runtime.give_up_after=2"),
}


@pytest.mark.parametrize(("mistake", "message"), [("never called", "harness.command"), ("no score", "no-such-program")])
def test_a_run_in_which_nothing_works_ends_with_what_is_wrong(mistake: str, message: str, tmp_path: Path):
    kit = RunKit(tmp_path)
    kit.task(tmp_path / "broken" / "one", test_sh="no-such-program\n")
    overrides = [word.format(folder=tmp_path) for word in USELESS[mistake]]
    process = kit.start("--set", "scheduler.num_cells=1", *overrides)
    assert process.wait() == 2
    assert "executions could not be used" in kit.output() and message in kit.output()


def test_after_kill_9_and_torn_journals_a_resumed_run_keeps_every_finished_execution(tmp_path: Path):
    """With two gateways, whose journals are read as one, and groups that start in the order of what their tasks took before."""
    kit = RunKit(tmp_path, steps=4)
    process = kit.start("--set", "gateway.processes=2", "--set", "scheduler.order=longest-first")
    kit.wait_until(lambda: kit.has_begun() and bool(metrics(kit.run_folder(), StepFinished)), process)
    kill(process.pid)
    process.wait()
    folder = kit.run_folder()
    before = executions_done(folder)
    assert folder.gateway_journals == [folder.gateway_journal, folder.journal / "gateway-1.log"]
    for journal in (folder.controller_journal, *folder.gateway_journals):
        with open(journal, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # its writer dies with the controller, a moment later
            file.write(b"half a record")
    left = f"{segment_prefix(folder.path.absolute())}-*"
    assert list(SHM_DIR.glob(left)), "a killed run leaves its shared memory"
    kit.run("--resume", str(folder.path))
    assert not list(SHM_DIR.glob(left))
    assert f"{folder.controller_journal}: cut 13 damaged bytes" in kit.output(whole=True)
    assert len(list(folder.journal.glob("*.corrupt-*"))) == 3
    after = executions_done(folder)
    recorded = {log.opened.execution: len(log) for log in RecordedRun.open(folder.path).last_attempts()}
    assert all(recorded[execution] == done.counts.calls for execution, done in after.items())
    assert {gateway_of(execution, 2) for execution in after} == {0, 1}
    assert {execution: after[execution] for execution in before} == before
    assert summary(folder).steps == 4
    began = metrics(folder, RunBegan)
    assert [record.resumed for record in began] == [False, True]
    assert began[1].executions_kept == len(before)
    assert summary(folder).executions_lost == began[1].executions_redispatched
    foreseen = [record for _, record in read(folder.controller_journal, ControllerRecord) if isinstance(record, Foreseen)]
    assert any(seconds > 0 for record in foreseen for seconds in record.seconds), "tasks that came before are known"
    make_longer(kit, folder)


CERTIFICATES = Path(__file__).parents[1] / "certificates"


def make_longer(kit: RunKit, folder: RunFolder) -> None:
    """A run that has finished goes on for a step more, over TLS, and remembers that without being told again."""
    before = executions_done(folder)
    files = {"cert": "run-node.pem", "key": "run-node.key", "ca": "run-ca.pem"}
    over_tls = [f"--set=tls.{name}={CERTIFICATES / file}" for name, file in files.items()]
    kit.run("--resume", str(folder.path), "--set", "scheduler.steps=5", "--set=transfer.transport=tcp", *over_tls)
    for process in ("controller", "gateway", "cell-0", "cell-1", "cell-2"):
        assert "speaks_tls" in (folder.logs / f"{process}.log").read_text()
    assert "from now on: scheduler.steps = 5" in kit.output(whole=True)
    after = executions_done(folder)
    assert summary(folder).steps == 5 and {execution: after[execution] for execution in before} == before
    assert len(after) > len(before)
    changes = [
        record.changes() for _, record in read(folder.controller_journal, ControllerRecord) if isinstance(record, Reconfigured)
    ]
    assert changes == [{"steps": 5}]
    kit.run("--resume", str(folder.path))
    assert "has finished" in kit.output()


def weights_of(folder: RunFolder, step: int) -> dict[str, np.ndarray]:
    return load_file(folder.checkpoints / f"step-{step:06d}" / "model.safetensors")
