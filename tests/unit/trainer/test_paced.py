"""The trainer that only takes time keeps the order of use of the real one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import TrainerError
from qwengyre.core.records import MicroStep, TrainingExecution
from qwengyre.paced.trainer import PacedTrainer
from qwengyre.testing.paced import PLAN
from qwengyre.transfer.shm import ShmTransport, cleanup

MICRO_STEP = MicroStep("s000002-g000000-m0", 2, (TrainingExecution("e000000-0", 0, 0.5, 1.0, (), 7),), 30)


@pytest.fixture
def transport(prefix):
    made = ShmTransport(prefix)
    yield made
    made.close()
    assert cleanup(prefix) == 0


def test_a_step_moves_the_weights_and_a_satellite_reads_them(transport):
    core, satellite = PacedTrainer(PLAN, transport), PacedTrainer(PLAN, transport)
    core.begin_step(2)
    assert core.compute(MICRO_STEP).tokens_trained == 7
    core.reduce(1)
    assert core.apply(1).applied
    satellite.pull(core.expose(3, 0))
    assert np.array_equal(satellite.weights, core.weights)
    assert core.weights[0] == 1


def test_replicas_of_a_cell_compute_side_by_side_and_the_sum_waits_for_the_last(transport, monkeypatch):
    """Three micro-steps of 10 s on two replicas: two start at once, the third when one is free, all are done after 20 s."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    trainer = PacedTrainer(msgspec.structs.replace(PLAN, micro_steps_s=[10.0], num_replicas=2), transport)
    trainer.begin_step(2)
    answered = []
    for _ in range(3):
        trainer.compute(MICRO_STEP)
        answered.append(now[0] - 100.0)
    assert answered == [0.0, 10.0, 10.0]
    trainer.reduce(1)
    assert now[0] == 120.0


def test_micro_step_of_another_step_is_refused(transport):
    trainer = PacedTrainer(PLAN, transport)
    trainer.begin_step(1)
    with pytest.raises(TrainerError, match="belongs to step 2"):
        trainer.compute(MICRO_STEP)


def test_checkpoint_brings_step_and_weights_back(transport, tmp_path):
    core = PacedTrainer(PLAN, transport)
    core.begin_step(2)
    core.apply(1)
    core.save_checkpoint(tmp_path / "step-3", 3, tmp_path, {"journal_position": 9})
    other = PacedTrainer(PLAN, transport)
    assert other.load_checkpoint(tmp_path / "step-3")["extra"] == {"journal_position": 9}
    assert (other.step, other.weights[0]) == (3, 1.0)


def test_log_probs_cannot_be_audited(transport, tmp_path):
    with pytest.raises(TrainerError, match="audit_logprobs"):
        PacedTrainer(PLAN, transport).audit([], tmp_path)
