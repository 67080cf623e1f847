"""What a cell and its ranks say to one another. A rank joins; from then on the cell asks and the rank replies.

Every rank of a cell gets each request at the same time: its trainer takes part in every collective. What the cell passes on as it was
asked (Compute, Reduce, Apply, LoadCheckpoint, Audit) is of `cell/api.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from qwengyre.hooks.load import HookRef
from qwengyre.rpc.tls import TlsConfig
from qwengyre.trainer.api import Membership
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.transports import TransportPlace


class JoinOrders(msgspec.Struct, frozen=True):
    """What a launcher tells a rank on another machine, in a file for this user only."""

    rank: int
    at: str
    """`tcp://HOST:PORT` where the cell waits for its ranks."""
    secret: bytes
    """The run's: both sides prove that they know it before anything is said."""
    host: str
    """Address of this machine: its shard is read there."""
    timeout_s: float
    """Longest wait for the cell."""
    ready_file: str
    """Written when the cell has let this rank in."""
    tls: TlsConfig = TlsConfig()


class Join(msgspec.Struct, frozen=True, tag=True):
    """A rank to its cell; the reply is what it is to be."""

    rank: int


class RankSpec(msgspec.Struct, frozen=True, tag=True):
    """Everything a rank needs to start."""

    rank: int
    store: str
    """`tcp://HOST:PORT` of the store in which the ranks of this cell find each other."""
    secret: bytes
    model_dir: str
    trainer: TrainerConfig
    place: TransportPlace
    threads: int
    token_loss: HookRef | None = None
    """`hooks.token_loss` of the run: every rank imports it for itself."""
    tls: TlsConfig = TlsConfig()


class Connect(msgspec.Struct, frozen=True, tag=True):
    membership: Membership


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


class Pull(msgspec.Struct, frozen=True, tag=True):
    snapshot: Exposure


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    step: int


class Expose(msgspec.Struct, frozen=True, tag=True):
    version: int
    incarnation: int


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Bring the whole weights together on rank 0."""


class Offload(msgspec.Struct, frozen=True, tag=True):
    pass


class Restore(msgspec.Struct, frozen=True, tag=True):
    pass


class SaveWeights(msgspec.Struct, frozen=True, tag=True):
    path: str


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    directory: str
    step: int
    files: str
    extra: dict[str, Any]
