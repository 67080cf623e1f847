"""The same journal and seed, on one cell, CPU and fp32, give the same commands and the same weights, bit by bit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qwengyre.core.records import MicroStep
from qwengyre.journal import read
from qwengyre.runtime.prepare import prepare
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.runtime.recovery import recover
from qwengyre.runtime.run_config import load_run
from qwengyre.scheduler.commands import RunOptimizer
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmTransport
from tests.integration.run_kit import RunKit

pytestmark = pytest.mark.integration


def test_a_journal_replays_to_the_same_commands_and_the_same_weights(tmp_path: Path, prefix: str):
    kit = RunKit(tmp_path, steps=2)
    kit.run_file.write_text(kit.run_file.read_text().replace("num_cells = 3", "num_cells = 1"))
    folder = kit.run()
    config = load_run(folder.config)

    recovered = recover(folder.controller_journal, prepare(config, lambda line: None).scheduler)
    assert recovered.scheduler.state.is_finished

    trained: dict[int, list[MicroStep]] = defaultdict(list)
    for _, micro_step in read(folder.trained_journal, MicroStep):
        trained[micro_step.step].append(micro_step)
    decided = [record for _, record in read(folder.controller_journal, ControllerRecord) if isinstance(record, Decided)]
    num_executions = {
        command.step: command.num_executions
        for record in decided
        for command in record.commands
        if isinstance(command, RunOptimizer)
    }
    assert set(trained) <= set(num_executions) == {0, 1}

    torch.set_num_threads(config.runtime.threads_per_cell)  # sums are split over threads
    trainer = Trainer(Path(config.policy.model), config.trainer, ShmTransport(prefix))
    for step, num in sorted(num_executions.items()):
        trainer.begin_step(step)
        for micro_step in trained[step]:
            trainer.compute(micro_step)
        trainer.apply(num)
    weights = load_file(folder.checkpoints / "step-000002" / "model.safetensors")
    replayed = trainer.flat.arrays()
    assert weights.keys() == replayed.keys()
    assert all(np.array_equal(weights[name], replayed[name]) for name in weights)
    assert any(
        not np.array_equal(weights[name], start) for name, start in load_file(tmp_path / "model" / "model.safetensors").items()
    )
