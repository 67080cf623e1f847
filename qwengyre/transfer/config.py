"""Settings of transfers: the `[transfer]` table of a run file."""

from __future__ import annotations

from typing import Literal

import msgspec

TransportKind = Literal["auto", "shm", "tcp", "mooncake"]


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How snapshots and KV blocks travel between the cells of a run."""

    transport: TransportKind = "auto"
    """`shm`: shared memory, all cells on one host. `tcp`: a block server in every process. `mooncake`: the Mooncake Transfer
    Engine, of the extra `mooncake`. `auto`: by the launcher, `shm` or `tcp`."""
    host: str = ""
    """Address that `tcp` and `mooncake` are read at; empty: the cell's own. Other hosts must reach it. Traffic is not encrypted."""
    mooncake_trusts_network: bool = False
    """Mooncake asks nobody who he is and listens on every interface: whoever reaches a node's ports can read and OVERWRITE weights and
    KV. Set it to true if nobody but this run's nodes can reach them; a run with `transport = "mooncake"` does not start otherwise."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What Mooncake uses. `rdma` needs an HCA on every host and refuses to start without one."""
    mooncake_device: str = ""
    """HCAs that Mooncake may use, separated by commas; empty: all."""
    deadline_s: float = 30.0
    """Longest silence of an owner during a read over TCP; then TransferError."""

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive, is {self.deadline_s}")

    def resolved(self, *, one_host: bool) -> TransferConfig:
        """With `auto` decided: shared memory where all cells share it, else TCP."""
        return self if self.transport != "auto" else msgspec.structs.replace(self, transport="shm" if one_host else "tcp")
