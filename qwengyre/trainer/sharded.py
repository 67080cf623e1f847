"""A cell of several ranks: parameters, gradients and optimizer state in shards (torch FSDP2, `fully_shard`).

`R` ranks of the cell, `N` numbers of this rank's shards.

All ranks of a cell run one claim: its executions are dealt out to them, each lays out and computes its own row, and the
reduce-scatter of the backward adds them up (divide factor 1: sums, as everywhere). Ranks with fewer chunks, or with nothing,
run placeholder rows, so that every rank takes part in every collective; what one rank refuses, all refuse. Shard r of a
satellite is summed to shard r of the core by a `Members` of its own, and read from the core's rank r. Files hold whole
weights: they are gathered on rank 0, so that a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from qwengyre.core.errors import HookFailed, TrainerError
from qwengyre.core.records import MicroStep
from qwengyre.models.placement import HOST, wide
from qwengyre.rpc.refusal import Refused, describe, rebuild
from qwengyre.trainer.flat import NUM_COUNTERS, FlatParameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Result = TypeVar("Result")


class Alone:
    """The only rank of its cell: the interface of `Ranks` without a collective."""

    rank, size = 0, 1

    def parameters(self, model: nn.Module, dtype: torch.dtype, device: torch.device = HOST) -> FlatParameters:
        return FlatParameters(model, dtype, device)

    def shard(self, body: nn.Module, layers: list[nn.Module]) -> None:
        """Everything is here."""

    def reshard(self, body: nn.Module) -> None:
        """Nothing was gathered."""

    def assign(self, micro_step: MicroStep) -> MicroStep:
        return micro_step

    def all_reduce_max(self, count: int) -> int:
        return count

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        return numbers

    def run_collectively(self, job: Callable[[], Result]) -> Result:
        return job()


class Ranks:
    """The ranks of this cell, over torch's default process group: gloo, between the memories of hosts."""

    def __init__(self, device: str = "cpu"):
        """Needs an initialized default process group that holds exactly the ranks of this cell."""
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device, (self.size,))

    def parameters(self, model: nn.Module, dtype: torch.dtype, device: torch.device = HOST) -> ShardedParameters:
        return ShardedParameters(model, dtype, self, device)

    def shard(self, body: nn.Module, layers: list[nn.Module]) -> None:
        """Shard each layer, then what is left of `body`, over the ranks."""
        from torch.distributed.fsdp import fully_shard

        for module in (*layers, body):
            sharded = fully_shard(module, mesh=self.mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def reshard(self, body: nn.Module) -> None:
        """Give back what a forward without a backward has gathered of `body`."""
        from torch.distributed.fsdp import FSDPModule

        for module in body.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def assign(self, micro_step: MicroStep) -> MicroStep:
        """This rank's executions: longest first to the rank with least. The same on all ranks."""
        loads = [(0, rank) for rank in range(self.size)]
        mine = []
        for execution in sorted(micro_step.executions, key=lambda e: (-sum(t.num_tokens for t in e.trajectories), e.execution)):
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + sum(t.num_tokens for t in execution.trajectories), rank))
            if rank == self.rank:
                mine.append(execution)
        return msgspec.structs.replace(micro_step, executions=tuple(mine))

    def all_reduce_max(self, count: int) -> int:
        """The largest `count` of all ranks."""
        largest = torch.tensor([count], device=HOST)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        summed = numbers.clone()
        dist.all_reduce(summed)
        return summed

    def run_collectively(self, job: Callable[[], Result]) -> Result:
        """`job()` of this rank, or the TrainerError or HookFailed that it met on any rank: none goes on into a collective alone."""
        results: list[Result] = []
        error: TrainerError | HookFailed | None = None
        try:
            results.append(job())
        except (TrainerError, HookFailed) as met:
            error = met
        first = self.size - self.all_reduce_max(self.size - self.rank if error is not None else 0)
        if first < self.size:
            met_there = self._broadcast(msgspec.msgpack.encode(describe(error)) if error is not None else b"", first)
            raise error or rebuild(msgspec.msgpack.decode(met_there, type=Refused))
        return results[0]

    def _broadcast(self, content: bytes, source: int) -> bytes:
        """The content of rank `source`, on every rank."""
        size = torch.tensor([len(content)], device=HOST)
        dist.broadcast(size, source)
        heard = torch.zeros(int(size), dtype=torch.uint8, device=HOST)
        if self.rank == source:
            heard.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(heard, source)
        return heard.numpy().tobytes()


def _in_shards(model: nn.Module) -> dict[str, DTensor]:
    """Parameters by name; what is not sharded is a fault of ours."""
    from torch.distributed.tensor import DTensor

    found: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        found[name] = parameter
    return found


class ShardedParameters:
    """This rank's shards with the interface of `flat.FlatParameters`: flat copies, written back by `commit`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, ranks: Ranks, device: torch.device = HOST):
        self.parameters, self.dtype, self.ranks = _in_shards(model), dtype, ranks
        self.sums, self.device = wide(dtype), device
        self.shapes = {name: tuple(p.to_local().shape) for name, p in self.parameters.items()}
        ends = np.cumsum([p.to_local().numel() for p in self.parameters.values()]).tolist()
        starts = [0, *ends[:-1]]
        self.spans = dict(zip(self.parameters, zip(starts, ends, strict=True), strict=True))
        self.num_parameters = ends[-1]
        self.weights = torch.cat([p.to_local().detach().reshape(-1) for p in self.parameters.values()])
        self._gradient = torch.zeros(self.num_parameters + NUM_COUNTERS, dtype=self.sums, device=device)

    has_memory = True

    @property
    def gradient(self) -> Tensor:
        """(N + NUM_COUNTERS,): this rank's shards of the sums over all ranks of the cell."""
        for name, view in self.views(self._gradient).items():
            gradient = self.parameters[name].grad
            view.copy_(cast("DTensor", gradient).to_local()) if gradient is not None else view.zero_()
        return self._gradient

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[a:b].view(self.shapes[name]) for name, (a, b) in self.spans.items()}

    def decay_mask(self) -> Tensor:
        """1.0 for shards of matrices, 0.0 for those of norms and biases (N,)."""
        mask = torch.zeros_like(self.weights, dtype=self.sums)
        for name, (a, b) in self.spans.items():
            mask[a:b] = float(self.parameters[name].ndim >= 2)
        return mask

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights of this rank's shards, by Hugging Face name, on the host."""
        return {name: view.numpy() for name, view in self.views(self.weights.to(HOST)).items()}

    def landing(self) -> dict[str, np.ndarray]:
        """Where `arrays` of another process can be read to; `landed` takes them."""
        if self.device != HOST:
            self._staged = torch.empty(self.num_parameters, dtype=self.dtype, device=HOST)
        return {name: view.numpy() for name, view in self.views(self.weights if self.device == HOST else self._staged).items()}

    def landed(self) -> None:
        if self.device != HOST:
            self.weights.copy_(self._staged)

    def whole(self, flat: Tensor) -> dict[str, np.ndarray]:
        """What the shards `flat` of all ranks hold, by name: on rank 0, {} on the others. Called by all."""
        from torch.distributed.tensor import DTensor

        found = {}
        for name, view in self.views(flat).items():
            parameter = self.parameters[name]
            spread = (view, parameter.device_mesh, parameter.placements)
            full = DTensor.from_local(*spread, shape=parameter.shape, stride=parameter.stride()).full_tensor()
            if self.ranks.rank == 0:
                found[name] = full.to(HOST).numpy()
        return found

    def copy_in(self, flat: Tensor, arrays: dict[str, np.ndarray]) -> None:
        """Copy this rank's shards of whole arrays into `flat`, by name. Raises as `FlatParameters.copy_in`."""
        for name, view in self.views(flat).items():
            rows = self.parameters[name].shape[0]
            each = -(-rows // self.ranks.size)
            first = min(self.ranks.rank * each, rows)
            if arrays[name].shape != self.parameters[name].shape:
                raise ValueError(f"{name} has shape {arrays[name].shape}, the model has {tuple(self.parameters[name].shape)}")
            view.copy_(torch.from_numpy(arrays[name][first : first + each]))

    def commit(self) -> None:
        """Write `weights` into the model."""
        with torch.no_grad():
            for name, view in self.views(self.weights).items():
                self.parameters[name].to_local().copy_(view)

    def norm(self, gradient_N: Tensor) -> float:
        """L2 over the shards of all ranks."""
        return self.root(float(torch.linalg.vector_norm(gradient_N)) ** 2)

    def root(self, squares: float) -> float:
        """L2 of numbers whose squares add up to this on this rank, over all ranks."""
        return math.sqrt(float(self.ranks.all_reduce_sum(torch.tensor(squares, dtype=torch.float64, device=HOST))))

    def zero_gradient(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._gradient.zero_()

    def open_gradient(self) -> None:
        """Nothing to do: FSDP takes the memory of a gradient."""

    def restore(self) -> None:
        """Shards stay where they are."""

    def release(self, *, keep_weights: bool) -> None:
        self.zero_gradient()
