"""Sums of gradients over the present prefix of cells, over gloo or, between devices, NCCL (`sums.py`).

Cells are ranks 0..K-1 in their fixed order; rank 0 is the core. The groups of the prefixes 2..K are built once, when all
connect, so that membership can grow inside a step without building anything. A step with m members uses the group of
prefix m. Each group is its own context with its own deadline: no global process group exists, so a membership that
lost a cell is thrown away and built anew under the next number (`Members.connect` again, with the cells that are left).

`reduce` is two-phase: every member sends a copy of its sums, the core adds into scratch, and a second round confirms that
all of them got through. Whoever dies, every member's own sums are as they were.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has these names, too, but not in its types

from qwengyre.core.errors import MembershipBroken, WireError
from qwengyre.models.placement import HOST
from qwengyre.rpc.store import StoreClient
from qwengyre.trainer.api import Membership
from qwengyre.trainer.rendezvous import SecretStore, group_key, own_address, prove
from qwengyre.trainer.sums import GLOO, GlooSums, NcclSums, Sums, place_of, sums_over

BROKEN: Final = (RuntimeError, dist.DistError, WireError, OSError)
"""What gloo and the store raise when somebody is not there."""


class Members:
    """One membership, as one of its ranks sees it. Not thread-safe; collectives are called by all members."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._sums: dict[int, Sums] = {}

    @staticmethod
    def connect(membership: Membership, secret: bytes, shard: int = 0, device: torch.device = HOST) -> Members:
        """Meet the other ranks, prove to each other that all know the secret, and build the groups of all prefixes of this rank.

        `device` is where own sums lie. Cells of several processes call this once in each: those of one `shard` meet, all in one store. All
        ranks call this at the same time. Raises MembershipBroken when they do not meet within the deadline.
        """
        members, rank = Members(membership), membership.rank
        if membership.world == 1:
            return members
        try:
            with contextlib.closing(StoreClient(membership.store, secret, membership.timeout_s)) as client:
                store = SecretStore(client)
                for prefix in range(max(2, rank + 1), membership.world + 1):
                    name = f"membership{membership.number}/shard{shard}/prefix{prefix}"
                    group: dist.ProcessGroup = GLOO(c10d.PrefixStore(name, store), rank, prefix, _options(membership))
                    members._groups[prefix] = group
                    prove(group, rank, prefix, group_key(secret, membership.store, name))
                    members._sums[prefix] = _sums(c10d.PrefixStore(f"{name}/sums", store), group, membership, prefix, device)
        except BROKEN as error:
            members.close()
            raise members._broken(membership.world, f"they did not meet at {membership.store} ({error})") from error
        return members

    def reduce(self, gradient: Tensor, num_members: int) -> Tensor | None:
        """Sum `gradient` of ranks 0..num_members-1; the core gets the sum in a new array, on the host or on its device, the others None.

        `gradient` itself is not changed. Raises MembershipBroken when a member does not take part within the deadline; what
        the core then does with its own gradient is its decision.
        """
        if num_members == 1:
            return gradient.clone()
        rank, world = self.membership.rank, self.membership.world
        if not 2 <= num_members <= world or rank >= num_members:
            raise ValueError(f"rank {rank} of {world} cannot reduce over {num_members} members")
        group, sums = self._groups[num_members], self._sums[num_members]
        scratch = sums.scratch(gradient)
        try:
            sums.reduce(scratch)
            group.allreduce([torch.ones(1, device=HOST)]).wait()
        except (RuntimeError, dist.DistError) as error:
            raise self._broken(num_members, str(error)) from error
        return scratch if rank == 0 else None

    def close(self) -> None:
        """Drop every group. Peers that still wait get an error at once or at their deadline."""
        for sums in self._sums.values():
            sums.abort()
        for group in self._groups.values():
            group.abort()
        self._sums.clear()
        self._groups.clear()

    def _broken(self, num_members: int, reason: str) -> MembershipBroken:
        return MembershipBroken(
            rank=self.membership.rank, membership=self.membership.number, num_members=num_members, reason=reason
        )


def _sums(store: c10d.Store, group: dist.ProcessGroup, membership: Membership, size: int, device: torch.device) -> Sums:
    """Over what the members of this prefix can all sum."""
    store.set(f"place/{membership.rank}", place_of(device))
    places = [store.get(f"place/{rank}").decode() for rank in range(size)]
    if sums_over(places) == "nccl":
        return NcclSums(c10d.PrefixStore("nccl", store), membership.rank, size, membership.timeout_s, device)
    return GlooSums(group, membership.timeout_s)


def _options(membership: Membership) -> Any:
    options = GLOO._Options()
    options._timeout = timedelta(seconds=membership.timeout_s)
    options._devices = [GLOO.create_device(hostname=own_address(membership.store))]
    return options
