"""One rank of a cell's trainer: in the cell's own process (rank 0), in a child of it, or on another machine (`ranks/process.py`)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from qwengyre.cell.api import Applied, Apply, Audit, Audited, Compute, Computed, Exposed, LoadCheckpoint, Reduce
from qwengyre.cell.ranks import api
from qwengyre.core.errors import TrainerError
from qwengyre.hooks.token_loss import load_token_loss
from qwengyre.rpc.server import Done
from qwengyre.rpc.store import StoreClient
from qwengyre.trainer.member import MemberTrainer
from qwengyre.trainer.rendezvous import SecretStore, group_key, own_address, prove
from qwengyre.trainer.sharded import Ranks
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.api import Transport

SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of a network interface (netdevice(7))."""
MEETING_TIMEOUT_S: Final = 120.0
"""For the ranks of a cell to find each other: they import torch and load the same model, on machines of different speed."""


class OpenRank(NamedTuple):
    member: MemberTrainer
    store: SecretStore
    """torch's default group of this process uses it."""


def open_rank(spec: api.RankSpec, transport: Transport) -> OpenRank:
    """Meet the other ranks of the cell, and load this one's shard. Raises WireError when somebody else came in place of one."""
    torch.set_num_threads(spec.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own_address(spec.store)))
    size = spec.trainer.ranks
    store = SecretStore(StoreClient(spec.store, spec.secret, MEETING_TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=size)
    ranks = Ranks()
    assert dist.group.WORLD is not None
    for name, group in (("default", dist.group.WORLD), ("mesh", ranks.mesh.get_group())):
        prove(group, spec.rank, size, group_key(spec.secret, spec.store, f"ranks {name}"))
    objective = load_token_loss(spec.token_loss)
    trainer = Trainer(Path(spec.model_dir), spec.trainer, transport, ranks)
    trainer.objective = objective
    return OpenRank(MemberTrainer(trainer, spec.secret, shard=spec.rank), store)


def _done(result: object) -> Done:
    return Done()


TABLE: Final[dict[type[msgspec.Struct], tuple[Callable[..., Any], Callable[[Any], msgspec.Struct]]]] = {
    api.Connect: (MemberTrainer.connect, _done),
    api.Close: (MemberTrainer.close, _done),
    api.Pull: (MemberTrainer.pull, _done),
    api.BeginStep: (MemberTrainer.begin_step, _done),
    Compute: (MemberTrainer.compute, Computed),
    Reduce: (MemberTrainer.reduce, _done),
    Apply: (MemberTrainer.apply, Applied),
    api.Expose: (MemberTrainer.expose, Exposed),
    api.Gather: (MemberTrainer.gather, _done),
    api.Offload: (MemberTrainer.offload, _done),
    api.Restore: (MemberTrainer.restore, _done),
    api.SaveWeights: (MemberTrainer.save_weights, _done),
    api.SaveCheckpoint: (MemberTrainer.save_checkpoint, _done),
    LoadCheckpoint: (MemberTrainer.load_checkpoint, _done),
    Audit: (MemberTrainer.audit, Audited),
}
"""Request -> what carries it out, with the request's fields as arguments, and what makes the reply of its result."""


def carry_out(member: MemberTrainer, request: msgspec.Struct) -> msgspec.Struct:
    method, reply = TABLE[type(request)]
    return reply(method(member, *msgspec.structs.astuple(request)))


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
