"""A cell of several ranks: parameters, gradients and optimizer state in shards (torch FSDP2, `fully_shard`).

`R` ranks of the cell, `N` numbers of this rank's shards.

All ranks of a cell run one claim: its executions are dealt out to them, each lays out and computes its own row, and the
reduce-scatter of the backward adds them up (divide factor 1: sums, as everywhere). Ranks with fewer chunks, or with nothing,
run placeholder rows, so that every rank takes part in every collective. Shard r of a satellite is summed to shard r of the
core by a `Members` of its own, and read from the core's rank r.
"""

from __future__ import annotations

import heapq

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from qwengyre.core.records import MicroStep
from qwengyre.trainer.flat import NUM_COUNTERS


class Ranks:
    """The ranks of this cell, over torch's default process group (gloo on CPU)."""

    def __init__(self, device: str = "cpu"):
        """Needs an initialized default process group that holds exactly the ranks of this cell."""
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device, (self.size,))

    def shard(self, body: nn.Module, layers: list[nn.Module]) -> None:
        """Shard each layer, then what is left of `body`, over the ranks."""
        from torch.distributed.fsdp import fully_shard

        for module in (*layers, body):
            fully_shard(module, mesh=self.mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def part(self, micro_step: MicroStep) -> MicroStep:
        """This rank's executions: longest first to the rank with least. The same on all ranks."""
        loads = [(0, rank) for rank in range(self.size)]
        mine = []
        for execution in sorted(micro_step.executions, key=lambda e: (-sum(t.num_tokens for t in e.trajectories), e.execution)):
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + sum(t.num_tokens for t in execution.trajectories), rank))
            if rank == self.rank:
                mine.append(execution)
        return msgspec.structs.replace(micro_step, executions=tuple(mine))

    def most(self, count: int) -> int:
        """The largest `count` of all ranks."""
        largest = torch.tensor([count])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def total(self, numbers: Tensor) -> Tensor:
        summed = numbers.clone()
        dist.all_reduce(summed)
        return summed


class ShardedParameters:
    """This rank's shards with the interface of `flat.FlatParameters`: flat copies, written back by `commit`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, ranks: Ranks):
        self.parameters, self.dtype, self.ranks = dict(model.named_parameters()), dtype, ranks
        self.shapes = {name: tuple(p.to_local().shape) for name, p in self.parameters.items()}
        ends = np.cumsum([p.to_local().numel() for p in self.parameters.values()]).tolist()
        starts = [0, *ends[:-1]]
        self.spans = {name: span for name, span in zip(self.parameters, zip(starts, ends, strict=True), strict=True)}
        self.num_parameters = ends[-1]
        self.weights = torch.cat([p.to_local().detach().reshape(-1) for p in self.parameters.values()])
        self._gradient = torch.zeros(self.num_parameters + NUM_COUNTERS, dtype=dtype)

    has_memory = True

    @property
    def gradient(self) -> Tensor:
        """(N + NUM_COUNTERS,): this rank's shards of the sums over all ranks of the cell."""
        for name, view in self.views(self._gradient).items():
            gradient = self.parameters[name].grad
            view.copy_(gradient.to_local()) if gradient is not None else view.zero_()
        return self._gradient

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[a:b].view(self.shapes[name]) for name, (a, b) in self.spans.items()}

    def decay_mask(self) -> Tensor:
        """1.0 for shards of matrices, 0.0 for those of norms and biases (N,)."""
        mask = torch.zeros_like(self.weights)
        for name, (a, b) in self.spans.items():
            mask[a:b] = float(self.parameters[name].ndim >= 2)
        return mask

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights of this rank's shards, by Hugging Face name."""
        return {name: view.numpy() for name, view in self.views(self.weights).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy this rank's shards in, by name."""
        for name, view in self.views(self.weights).items():
            view.copy_(tensors[name])
        self.commit()

    def commit(self) -> None:
        """Write `weights` into the model."""
        with torch.no_grad():
            for name, view in self.views(self.weights).items():
                self.parameters[name].to_local().copy_(view)

    def norm(self, gradient_N: Tensor) -> float:
        """L2 over the shards of all ranks."""
        return float(self.ranks.total(gradient_N.square().sum()).sqrt())

    def zero_gradient(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._gradient.zero_()

    def restore(self) -> None:
        """Shards stay where they are."""

    def release(self, *, keep_weights: bool) -> None:
        self.zero_gradient()
