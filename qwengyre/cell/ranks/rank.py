"""One rank of a cell's trainer: in the cell's own process (rank 0), in a child of it, or on another machine (`rank_process.py`).

The orders are method names of `Rank` and `Trainer`; every rank of the cell gets each of them at the same time.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from qwengyre.core.errors import TrainerError
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.members import Members, own_address
from qwengyre.trainer.records import StepStats
from qwengyre.trainer.sharded import Ranks
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.api import Carrier, Exposure
from qwengyre.transfer.carriers import CarrierPlace

SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of a network interface (netdevice(7))."""


class RankSpec(msgspec.Struct, frozen=True):
    """Everything a rank needs to start."""

    rank: int
    store: str
    """`host:port` where rank 0 has the store in which the ranks of this cell find each other."""
    model_dir: str
    trainer: TrainerConfig
    place: CarrierPlace
    threads: int


class Rank:
    """This rank's trainer and its membership among the ranks of the same number in the other cells."""

    def __init__(self, spec: RankSpec, carrier: Carrier, store: dist.Store) -> None:
        torch.set_num_threads(spec.threads)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own_address(spec.store)))
        dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.trainer.ranks)
        self.number = spec.rank
        self.trainer = Trainer(Path(spec.model_dir), spec.trainer, carrier, Ranks())
        self._members: Members | None = None
        self._sum: Tensor | None = None

    def call(self, method: str, args: tuple) -> Any:
        """One order. What both have, `Rank` answers."""
        return getattr(self if hasattr(self, method) else self.trainer, method)(*args)

    def connect(self, rank: int, world: int, store_address: str, epoch: int, timeout_s: float) -> None:
        self.close()
        self._members = Members.connect(rank, world, store_address, epoch, timeout_s, shard=self.number)

    def close(self) -> None:
        if self._members is not None:
            self._members.close()
            self._members = None

    def pull(self, exposure: Exposure) -> None:
        """Read the shard of the core's rank with this number."""
        self.trainer.pull((exposure, *exposure.others)[self.number])

    def reduce(self, num_members: int) -> None:
        assert self._members is not None, "members are connected before they reduce"
        self._sum = self._members.reduce(self.trainer.flat_gradient(), num_members)

    def apply(self, num_executions: int, is_reduced: bool) -> StepStats:
        stats = self.trainer.apply(num_executions, self._sum if is_reduced else None)
        self._sum = None
        return stats


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address, which is how gloo wants to be told. Raises TrainerError.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise TrainerError(f"no network interface has the address {address}: name one in GLOO_SOCKET_IFNAME")
