"""Settings of transfers: the `[transfer]` table of a run file."""

from __future__ import annotations

from typing import Literal

import msgspec


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How snapshots and KV blocks travel between the cells of a run."""

    carrier: Literal["auto", "shm", "tcp"] = "auto"
    """`shm`: shared memory, all cells on one host. `tcp`: a block server in every process. `auto`: by the launcher."""
    host: str = ""
    """Address that the `tcp` carrier listens on; empty: the cell's own. Other hosts must reach it. Traffic is not encrypted."""
    deadline_s: float = 30.0
    """Longest silence of an owner during a read over TCP; then TransferError."""

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive, is {self.deadline_s}")

    def resolved(self, *, one_host: bool) -> TransferConfig:
        """With `auto` decided: shared memory where all cells share it, else TCP."""
        return self if self.carrier != "auto" else msgspec.structs.replace(self, carrier="shm" if one_host else "tcp")
