"""The whole path through the real program: harness, gateway, tree, step, publish; twice, with a kill between."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from qwengyre.telemetry.records import EvaluationFinished, RunBegan, StepFinished
from tests.integration.run_kit import RunKit, executions_done, kill, metrics, summary

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
    assert list(folder.checkpoints.iterdir()) and list(folder.tensorboard.iterdir())


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
    kit = RunKit(tmp_path, steps=4)
    process = kit.start()
    kit.wait_until(lambda: kit.has_begun() and bool(metrics(kit.run_folder(), StepFinished)), process)
    kill(process.pid)
    process.wait()
    folder = kit.run_folder()
    before = executions_done(folder)
    for journal in (folder.controller_journal, folder.gateway_journal):
        with open(journal, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # its writer dies with the controller, a moment later
            file.write(b"half a record")
    kit.run("--resume", str(folder.path))
    assert f"{folder.controller_journal}: cut 13 damaged bytes" in kit.output(whole=True)
    assert len(list(folder.journal.glob("*.corrupt-*"))) == 2
    after = executions_done(folder)
    assert {execution: after[execution] for execution in before} == before
    assert summary(folder).steps == 4
    began = metrics(folder, RunBegan)
    assert [record.resumed for record in began] == [False, True]
    assert began[1].executions_kept == len(before)
    assert summary(folder).executions_lost == began[1].executions_redispatched
