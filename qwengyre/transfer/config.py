"""Settings of transfers: the `[transfer]` table of a run file."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

TransportKind = Literal["auto", "shm", "tcp", "mooncake"]
NETWORK_FANOUT: Final = 2
"""Copies of a snapshot that leave one holder: with 2 the depth grows as the logarithm of the cells, and the owner's link carries no more
than if there were three cells."""


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How snapshots and KV blocks travel between the cells of a run."""

    transport: TransportKind = "auto"
    """`shm`: shared memory, all cells on one host. `tcp`: a block server in every process. `mooncake`: the Mooncake Transfer
    Engine, of the extra `mooncake`. `auto`: by the launcher, `shm` or `tcp`."""
    host: str = ""
    """Address at which `tcp` and `mooncake` serve reads; empty: the cell's own. Other hosts must reach it. It is encrypted with `[tls]`."""
    mooncake_trusts_network: bool = False
    """Mooncake authenticates nobody and listens on every interface: whoever reaches a node's ports can read and OVERWRITE weights and
    KV. Set it to true if nobody but this run's nodes can reach them; a run with `transport = "mooncake"` does not start otherwise."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What Mooncake uses. `rdma` needs an HCA on every host and refuses to start without one."""
    mooncake_device: str = ""
    """HCAs that Mooncake may use, separated by commas; empty: all."""
    deadline_s: float = 30.0
    """Longest silence of an owner during a read over TCP; then TransferError."""

    fanout: int = -1
    """How often a cell sends one snapshot of the weights: cells that have read it serve it on, each from a copy in its host's memory. 0: all
    read from the core. -1: 2 over a network, 0 in shared memory, where there is no link to spare."""

    def __post_init__(self) -> None:
        if self.fanout < -1:
            raise ValueError(f"fanout must be -1 (by the transport), 0 (no bound) or positive, is {self.fanout}")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive, is {self.deadline_s}")

    def resolved(self, *, one_host: bool) -> TransferConfig:
        """With `auto` decided: shared memory where all cells share it, else TCP."""
        return self if self.transport != "auto" else msgspec.structs.replace(self, transport="shm" if one_host else "tcp")

    @property
    def most_copies(self) -> int:
        """How often one holder sends a snapshot; 0: as often as it is asked. For a config whose transport is decided."""
        if self.fanout >= 0:
            return self.fanout
        return 0 if self.transport == "shm" else NETWORK_FANOUT
