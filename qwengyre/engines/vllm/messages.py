"""What the adapter and vLLM's worker say to each other."""

from __future__ import annotations

import msgspec

from qwengyre.engines.api import KVHandle
from qwengyre.rpc.refusal import Refused
from qwengyre.transfer.transports import TransportPlace

WORKER_FAILED = "WorkerFailed"
"""Kind of a failure that nobody foresaw: what state the worker is in is not known."""


class Setup(msgspec.Struct, frozen=True):
    """What the adapter tells a worker once."""

    model_dir: str
    fingerprint: str
    place: TransportPlace


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    failure: Refused | None = None
    handle: KVHandle | None = None
    token_ids: bytes = b""
    missed: list[str] = []
    """Parameters that got nothing out of a snapshot, and tensors of it that no loader took."""
    probe: bytes = b""
    """What was published with the weights just read (`models/probe.py`)."""
    seconds: float = 0.0
