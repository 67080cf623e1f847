"""Sums between members that know the run's secret, and between none else."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from qwengyre.core.errors import MembershipBroken, WireError
from qwengyre.rpc.store import KeyStore, StoreClient
from qwengyre.testing.sockets import listening_hosts
from qwengyre.trainer import members as members_module
from qwengyre.trainer.api import Membership
from qwengyre.trainer.members import Members
from qwengyre.trainer.rendezvous import SecretStore, group_key, prove

SECRET, OTHER = b"secret", b"a stranger's"
COMES_S, STAYS_AWAY_S = 120.0, 0.5


@pytest.fixture
def store():
    made = KeyStore("127.0.0.1", SECRET)
    yield made
    made.close()


def together(num: int, job) -> list:
    """`job(rank)` of all ranks at once; an error in place of a result."""

    def caught(rank: int):
        try:
            return job(rank)
        except Exception as error:  # what it is, is the caller's to say
            return error

    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(caught, range(num)))


def test_members_sum_to_the_core_and_own_gradients_stay(store: KeyStore):
    members = together(3, lambda rank: Members.connect(Membership(1, rank, 3, store.address, COMES_S), SECRET))
    gradients = [torch.full((5,), float(10**rank)) for rank in range(3)]
    for num, expected in ((2, 11.0), (3, 111.0)):
        summed = together(num, lambda rank, num=num: members[rank].reduce(gradients[rank], num))
        assert summed[0].tolist() == [expected] * 5 and summed[1:] == [None] * (num - 1)
    assert [gradient[0].item() for gradient in gradients] == [1.0, 10.0, 100.0]
    for one in members:
        one.close()


class OnDevices:
    """In place of NCCL: the ranks of one process add up under each other's eyes, and the test says whether one takes part."""

    given: ClassVar[dict[int, torch.Tensor]] = {}
    meet: ClassVar[Barrier] = Barrier(2)
    aborted: ClassVar[list[int]] = []
    is_cut = False

    def __init__(self, store, rank: int, size: int, timeout_s: float, device: torch.device) -> None:
        self.rank = rank

    def scratch(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone()

    def reduce(self, scratch: torch.Tensor) -> None:
        if self.is_cut:
            scratch.fill_(torch.nan)
            raise RuntimeError("the sum over devices did not end")
        self.given[self.rank] = scratch
        self.meet.wait()
        if self.rank == 0:
            scratch += self.given[1]
        self.meet.wait()

    def abort(self) -> None:
        self.aborted.append(self.rank)


def test_members_on_devices_of_their_own_sum_there_and_those_that_share_one_do_not(store: KeyStore, monkeypatch):
    """Rank 2 is on the device of rank 0: the prefix of two sums over devices, that of three through the hosts' memory."""
    monkeypatch.setattr(members_module, "NcclSums", OnDevices)
    monkeypatch.setattr(members_module, "place_of", lambda device: f"GPU-{device.index % 2}")

    def connect(rank: int) -> Members:
        return Members.connect(Membership(1, rank, 3, store.address, COMES_S), SECRET, device=torch.device("cuda", rank))

    members = together(3, connect)
    gradients = [torch.full((5,), float(10**rank)) for rank in range(3)]
    kinds = [{prefix: type(sums).__name__ for prefix, sums in one._sums.items()} for one in members]
    assert kinds == [{2: "OnDevices", 3: "GlooSums"}] * 2 + [{3: "GlooSums"}]
    for num, expected in ((2, 11.0), (3, 111.0)):
        summed = together(num, lambda rank, num=num: members[rank].reduce(gradients[rank], num))
        assert summed[0].tolist() == [expected] * 5 and summed[1:] == [None] * (num - 1)
    monkeypatch.setattr(OnDevices, "is_cut", True)
    assert [type(one) for one in together(2, lambda rank: members[rank].reduce(gradients[rank], 2))] == [MembershipBroken] * 2
    assert [gradient[0].item() for gradient in gradients] == [1.0, 10.0, 100.0]
    for one in members:
        one.close()
    assert sorted(OnDevices.aborted) == [0, 1]


def test_nothing_of_a_rendezvous_listens_where_other_machines_can_connect(store: KeyStore):
    before = Counter(listening_hosts(os.getpid()))
    members = together(2, lambda rank: Members.connect(Membership(1, rank, 2, store.address, COMES_S), SECRET))
    assert set(Counter(listening_hosts(os.getpid())) - before) == {"127.0.0.1"}
    for one in members:
        one.close()


def test_without_the_secret_nobody_becomes_a_member(store: KeyStore):
    def connect(rank: int) -> Members:
        return Members.connect(Membership(1, rank, 2, store.address, STAYS_AWAY_S), SECRET if rank == 0 else OTHER)

    found = together(2, connect)
    assert [type(one) for one in found] == [MembershipBroken] * 2


def test_members_of_two_memberships_do_not_meet(store: KeyStore):
    found = together(2, lambda rank: Members.connect(Membership(rank, rank, 2, store.address, STAYS_AWAY_S), SECRET))
    assert [type(one) for one in found] == [MembershipBroken] * 2


class Group:
    """Two ends of one gloo group, as somebody gets it who was quicker than the right one."""

    def __init__(self, store: KeyStore) -> None:
        self.clients = [StoreClient(store.address, SECRET, COMES_S) for _ in range(2)]
        self.stores = [SecretStore(client) for client in self.clients]
        self.ends = together(2, self._open)

    def _open(self, rank: int) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=STAYS_AWAY_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(dist.PrefixStore("group", self.stores[rank]), rank, 2, options)

    def close(self) -> None:
        for end in self.ends:
            end.abort()
        for client in self.clients:
            client.close()


KEY = group_key(SECRET, "store", "group")


@pytest.mark.parametrize("key", [group_key(OTHER, "store", "group"), group_key(SECRET, "store", "earlier group")])
def test_who_connects_in_place_of_a_member_is_found_out(store: KeyStore, key: bytes):
    group = Group(store)
    found = together(2, lambda rank: prove(group.ends[rank], rank, 2, KEY if rank == 0 else key))
    assert isinstance(found[0], WireError) and "rank 1 does not know the secret" in str(found[0])
    group.close()


def test_who_connects_in_place_of_a_member_and_says_nothing_is_not_waited_for_without_end(store: KeyStore):
    group = Group(store)
    with pytest.raises(RuntimeError):
        prove(group.ends[0], 0, 2, KEY)
    group.close()


def test_a_proof_cannot_be_sent_back_to_who_gave_it(store: KeyStore):
    group = Group(store)

    def echo(rank: int) -> None:
        if rank == 0:
            prove(group.ends[0], 0, 2, KEY)
        else:
            heard = torch.zeros(32, dtype=torch.uint8)
            group.ends[1].recv([heard], 0, 0x5147).wait()
            group.ends[1].send([heard], 0, 0x5147).wait()

    assert isinstance(together(2, echo)[0], WireError)
    group.close()
