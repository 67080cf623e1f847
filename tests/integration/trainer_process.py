"""Trainers of cells: `python trainer_process.py ADDRESS MODEL_DIR PREFIX DTYPE NUM_PROCESSES RANKS_PER_CELL CHUNK_TOKENS LORA_RANK`.

Imports once, then forks (nothing has started a thread yet). Each process says (index, pid), then answers (method, args)
until it is told to stop.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM  # noqa: F401  imported before the fork, once

from qwengyre.core.errors import QwenGyreError
from qwengyre.testing.training import InDouble
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.members import Members
from qwengyre.trainer.sharded import Alone, Ranks
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmCarrier


class Cell:
    def __init__(self, model_dir: Path, prefix: str, ranks: Alone | Ranks, dtype: str, chunk_tokens: int, lora: int):
        torch.set_num_threads(1)
        config = TrainerConfig(
            learning_rate=0.01,
            clip_low=0.999,
            clip_high=1e6,
            chunk_tokens=chunk_tokens,
            dtype=dtype,
            lora=LoraConfig(rank=lora),
        )
        self.trainer = Trainer(model_dir, config, ShmCarrier(prefix), ranks)
        self.members: Members | None = None
        self.sum: torch.Tensor | None = None

    def connect(self, *args):
        if self.members is not None:
            self.members.close()
        self.members = Members.connect(*args)

    def reduce(self, num_members):
        self.sum = self.members.reduce(self.trainer.flat_gradient(), num_members)

    def sums(self):
        return (self.trainer.flat_gradient() if self.sum is None else self.sum).numpy().copy()

    def sums_by_name(self):
        sums = self.trainer.flat_gradient() if self.sum is None else self.sum
        return {name: view.numpy().copy() for name, view in self.trainer.flat.views(sums).items()}

    def whole_weights(self):
        return {name: array.copy() for name, array in self.trainer.whole_weights().items()}

    def weights(self):
        """Those that are updated: the optimizer's own where the model's are rounded from them."""
        own = None if self.trainer.optimizer is None else self.trainer.optimizer.master_N
        found = self.trainer.flat.weights if own is None else own
        return found.to(self.trainer.flat.sums).numpy().copy()

    def apply(self, num_executions):
        stats, self.sum = self.trainer.apply(num_executions, self.sum), None
        return stats

    def start_over(self, weights):
        self.trainer.flat.restore()
        self.trainer.flat.weights.copy_(torch.from_numpy(weights))
        self.trainer.optimizer, self.sum = None, None


def ranks_of(model_dir: str, index: int, per_cell: int) -> Alone | Ranks:
    """The ranks of this process's cell, met through a file."""
    if per_cell == 1:
        return Alone()
    meet = f"file://{model_dir}-ranks-of-cell-{index // per_cell}"
    dist.init_process_group("gloo", init_method=meet, rank=index % per_cell, world_size=per_cell)
    return Ranks()


def serve(address: str, model_dir: str, prefix: str, index: int, kind: tuple[str, int, int, int]) -> None:
    dtype, per_cell, chunk_tokens, lora = kind
    if dtype == "float64":
        InDouble().__enter__()  # for the life of this process
    cell = Cell(Path(model_dir), prefix, ranks_of(model_dir, index, per_cell), dtype, chunk_tokens, lora)
    with Client(address, "AF_UNIX") as connection:
        connection.send((index, os.getpid()))
        while (order := connection.recv()) is not None:
            method, args = order
            try:
                answer = getattr(cell, method, None) or getattr(cell.trainer, method)
                connection.send(answer(*args))
            except QwenGyreError as error:
                connection.send(f"{type(error).__name__}: {error}")
        cell.trainer.carrier.close()


def main(address: str, model_dir: str, prefix: str, dtype: str, *numbers: str) -> None:
    num_processes, *sizes = map(int, numbers)
    children = []
    for index in range(num_processes):
        if (pid := os.fork()) == 0:
            serve(address, model_dir, prefix, index, (dtype, *sizes))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
