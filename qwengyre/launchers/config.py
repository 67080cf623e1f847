"""Settings of launchers: the `[ray]` table of a run file."""

from __future__ import annotations

import math

import msgspec


class Reservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Ray reserves on one node for one cell, or for as many of its ranks as share a node."""

    cpus: float = 1.0
    """CPU cores."""
    gpus: float = 0.0
    """Accelerators; the cell sees only these."""
    resources: dict[str, float] = {}
    """Ray's custom resources: `{ trainer = 1 }` keeps a cell on the nodes that were started with `--resources '{"trainer": 1}'`."""

    def __post_init__(self) -> None:
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus), *self.resources.items()):
            if not 0 <= amount < math.inf:
                raise ValueError(f"{name} must be a number from 0 on")
        if not any(self.bundle().values()):
            raise ValueError("something must be reserved: cpus, gpus or resources")

    def bundle(self) -> dict[str, float]:
        """As Ray wants it.

        >>> Room(gpus=2, resources={"trainer": 1}).bundle()
        {'CPU': 1.0, 'GPU': 2, 'trainer': 1}
        """
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where Ray places cells, with `launcher = "ray"`."""

    address: str = ""
    """Cluster to join: `auto` for the one this machine belongs to, or `HOST:PORT`. Empty: RAY_ADDRESS, else a new one here."""
    cell: Reservation = Reservation()
    """Room for each cell: a placement group of one bundle, or of one for each `ranks_per_node`."""
    ranks_per_node: int = 0
    """How many of the `trainer.ranks` of a cell share a node, and a bundle of `cell`; 0 puts all of them on one."""
    standalone: Reservation = Reservation()
    """Room for each standalone engine."""

    def __post_init__(self) -> None:
        if self.ranks_per_node < 0:
            raise ValueError("ranks_per_node must be a number from 0 on")

    def shares(self, ranks: int) -> list[range]:
        """The ranks of a cell by node.

        >>> RayConfig(ranks_per_node=2).shares(5), RayConfig().shares(5)
        ([range(0, 2), range(2, 4), range(4, 5)], [range(0, 5)])
        """
        each = self.ranks_per_node or ranks
        return [range(first, min(first + each, ranks)) for first in range(0, ranks, each)]
