"""What a trainer of one cell really takes: `python -m tests.unit.trainer.footprint_real FOLDER CHUNK_TOKENS ROWS`, a line of JSON.

In a process of its own, since what others have freed and the allocator has kept would hide what is taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from qwengyre.bench.measure import measure
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.flat import NUM_COUNTERS
from qwengyre.trainer.footprint import every_target
from qwengyre.trainer.trainer import Trainer
from qwengyre.trajectory.layout import LayoutPath, build_row


def main(folder: Path, chunk_tokens: int, rows: int) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(folder, TrainerConfig(chunk_tokens=chunk_tokens), transport=None)
    trainer.begin_step(0)
    trainer.flat.open_gradient()
    trainer.flat.gradient.fill_(1e-3)

    def train(rows: int) -> None:
        row = build_row([LayoutPath(np.zeros(rows, np.int32), (((0, 0, 0), rows),))])
        trainer.tree_model.train(row, every_target(rows), lambda logp_O: torch.ones_like(logp_O))

    train(64)  # libraries load code and take buffers of their own at first use
    passed = measure(lambda: train(rows))
    updated = measure(lambda: trainer.apply(1))
    assert trainer.optimizer is not None
    state = (trainer.flat.weights, trainer.flat.gradient[:-NUM_COUNTERS], trainer.optimizer.first_N, trainer.optimizer.second_N)
    found = {
        "pass": passed.peak_mb * 2**20,
        "state": sum(x.numel() * x.element_size() for x in state),
        "update": updated.peak_mb * 2**20,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
