"""What the process of a cell offers its engine and its trainer."""

from __future__ import annotations

from typing import NamedTuple

from qwengyre.hooks.load import HookRef
from qwengyre.transfer.api import Transport
from qwengyre.transfer.transports import TransportPlace


class RanksElsewhere(NamedTuple):
    """The ranks of this cell that are not children of its process."""

    num_here: int = 0
    """How many of the ranks run on this machine, the cell's own process included; 0: all."""
    address_file: str = ""
    """Where the cell writes at which address it waits for the others."""
    timeout_s: float = 0.0
    """Longest wait for them."""


class Home(NamedTuple):
    transport: Transport
    place: TransportPlace
    """Where `transport` was opened, for the other processes of the cell."""
    threads: int
    secret: bytes
    """The run's."""
    elsewhere: RanksElsewhere = RanksElsewhere()
    token_loss: HookRef | None = None
    """`hooks.token_loss` of the run."""
