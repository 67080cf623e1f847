"""Trainers of cells: `python trainer_process.py ADDRESS` imports once, which takes longer than any test, and forks at each request.

A request names the processes of one test; each of them says (index, pid), then answers (method, args) until it is told to stop. What
forks starts no thread and loads no model.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # before the fork, once, as are the models
from transformers import Qwen3_5ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen3NextForCausalLM  # noqa: F401

from qwengyre.core.errors import QwenGyreError
from qwengyre.testing.training import InDouble
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.members import Members
from qwengyre.trainer.sharded import Alone, Ranks
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmTransport


class Asked(NamedTuple):
    address: str
    """Where the processes say who they are."""
    model_dir: str
    prefix: str
    """Of their shared memory."""
    dtype: str
    num_processes: int
    ranks_per_cell: int
    chunk_tokens: int
    lora_rank: int
    """0: all weights are trained."""


class Cell:
    def __init__(self, asked: Asked, ranks: Alone | Ranks):
        torch.set_num_threads(1)
        config = TrainerConfig(
            learning_rate=0.01,
            clip_low=0.999,
            clip_high=1e6,
            chunk_tokens=asked.chunk_tokens,
            dtype=asked.dtype,
            lora=LoraConfig(rank=asked.lora_rank),
        )
        self.trainer = Trainer(Path(asked.model_dir), config, ShmTransport(asked.prefix), ranks)
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


def serve(asked: Asked, index: int) -> None:
    if asked.dtype == "float64":
        InDouble().__enter__()  # for the life of this process
    cell = Cell(asked, ranks_of(asked.model_dir, index, asked.ranks_per_cell))
    with Client(asked.address, "AF_UNIX") as connection:
        connection.send((index, os.getpid()))
        while (request := connection.recv()) is not None:
            method, args = request
            try:
                called = getattr(cell, method, None) or getattr(cell.trainer, method)
                connection.send(called(*args))
            except QwenGyreError as error:
                connection.send(f"{type(error).__name__}: {error}")
        cell.trainer.transport.close()


def main(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked: its connections say when it ends
    with Client(address, "AF_UNIX") as connection:
        while (request := connection.recv()) is not None:
            asked = Asked(*request)
            for index in range(asked.num_processes):
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    connection.close()
                    serve(asked, index)
                    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
