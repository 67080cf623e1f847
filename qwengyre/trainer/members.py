"""Sums of gradients over the present prefix of cells, over gloo.

Cells are ranks 0..K-1 in their fixed order; rank 0 is the core. The groups of the prefixes 2..K are built once, when all
connect, so that membership can grow inside a step without building anything. A step with m members uses the group of
prefix m. Each group is its own gloo context with its own deadline: no global process group exists, so a membership that
lost a cell is thrown away and built anew under the next epoch (`Members.connect` again, with the cells that are left).

`reduce` is two-phase: every member sends a copy of its sums, the core adds into scratch, and a second round confirms that
all of them got through. Whoever dies, every member's own sums are as they were.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from qwengyre.core.errors import MembershipBroken


class Members:
    """One membership epoch, as one of its ranks sees it. Not thread-safe; collectives are called by all members."""

    def __init__(self, rank: int, world: int, epoch: int, timeout_s: float, store: dist.Store | None):
        self.rank, self.world, self.epoch, self.timeout_s = rank, world, epoch, timeout_s
        self._store = store
        self._groups: dict[int, dist.ProcessGroupGloo] = {}

    @staticmethod
    def connect(rank: int, world: int, store_address: str, epoch: int, timeout_s: float, shard: int = 0) -> Members:
        """Meet the other ranks and build the groups of all prefixes that this rank is in.

        Cells of several processes call this once in each: those of one `shard` meet each other, all at the same address.
        `store_address` is `host:port` (rank 0 listens there) or `file:PATH` (one host). All ranks call this at the same
        time with the same world, address and epoch. Raises MembershipBroken when they do not meet within `timeout_s`.
        """
        if world == 1:
            return Members(0, 1, epoch, timeout_s, None)
        try:
            store = _open_store(store_address, is_owner=rank == shard == 0, world=world, timeout_s=timeout_s)
            members = Members(rank, world, epoch, timeout_s, store)
            for prefix in range(max(2, rank + 1), world + 1):
                scoped = dist.PrefixStore(f"epoch{epoch}/shard{shard}/prefix{prefix}", store)
                members._groups[prefix] = dist.ProcessGroupGloo(scoped, rank, prefix, _options(store_address, timeout_s))
        except (RuntimeError, dist.DistError) as error:
            reason = f"they did not meet at {store_address} ({error})"
            raise MembershipBroken(rank=rank, epoch=epoch, num_members=world, reason=reason) from error
        return members

    def reduce(self, gradient: Tensor, num_members: int) -> Tensor | None:
        """Sum `gradient` of ranks 0..num_members-1; the core gets the sum in a new array, the others None.

        `gradient` itself is not changed. Raises MembershipBroken when a member does not take part within the deadline; what
        the core then does with its own gradient is its decision.
        """
        if num_members == 1:
            return gradient.clone()
        if not 2 <= num_members <= self.world or self.rank >= num_members:
            raise ValueError(f"rank {self.rank} of {self.world} cannot reduce over {num_members} members")
        group = self._groups[num_members]
        scratch = gradient.clone()
        try:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = dist.ReduceOp.SUM, 0
            options.timeout = timedelta(seconds=self.timeout_s)
            group.reduce([scratch], options).wait()
            group.allreduce([torch.ones(1)]).wait()
        except (RuntimeError, dist.DistError) as error:
            raise MembershipBroken(rank=self.rank, epoch=self.epoch, num_members=num_members, reason=str(error)) from error
        return scratch if self.rank == 0 else None

    def close(self) -> None:
        """Drop every group. Peers that still wait get an error at once or at their deadline."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
        self._store = None


def _open_store(address: str, *, is_owner: bool, world: int, timeout_s: float) -> dist.Store:
    if address.startswith("file:"):
        return dist.FileStore(address.removeprefix("file:"), world)
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), None, is_owner, timedelta(seconds=timeout_s), wait_for_workers=False)


def _options(store_address: str, timeout_s: float) -> dist.ProcessGroupGloo._Options:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(store_address))]
    return options


def own_address(store_address: str) -> str:
    """The address of this machine that faces the store. What gloo takes by itself, the host's name, is often a loopback address.

    >>> own_address("127.0.0.1:80"), own_address("file:/tmp/store")
    ('127.0.0.1', '127.0.0.1')
    """
    if store_address.startswith("file:"):
        return "127.0.0.1"
    host, _, port = store_address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # of a datagram, nothing is sent by this
        probe.connect((host, int(port)))
        return probe.getsockname()[0]
