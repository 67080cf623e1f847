"""Settings of transfers: the `[transfer]` table of a run file."""

from __future__ import annotations

from typing import Literal

import msgspec


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How snapshots and KV blocks travel between the cells of a run."""

    carrier: Literal["shm", "tcp"] = "shm"
    """`shm`: shared memory, all cells on one host. `tcp`: a block server in every process."""
    host: str = "127.0.0.1"
    """Address that the `tcp` carrier listens on; other hosts must reach it. Traffic is not encrypted."""
    deadline_s: float = 30.0
    """Longest silence of an owner during a read over TCP; then TransferError."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be positive, is {self.deadline_s}")
