"""How the ranks of a cell find each other when some of them are on other machines."""

from __future__ import annotations

import msgspec


class Meeting(msgspec.Struct, frozen=True):
    """The cell's side."""

    ranks_here: int = 0
    """So many are processes of this machine, children of the cell; the others come to the address in `address_file`. 0: all."""
    address_file: str = ""
    """Written by the cell when it waits for ranks of other machines."""
    secret: bytes = b""
    """What those must know."""


class Joining(msgspec.Struct, frozen=True):
    """The side of a rank on another machine."""

    rank: int
    at: str
    """`host:port` where the cell waits for its ranks."""
    secret: bytes
    """The cell's: both sides prove that they know it before anything is exchanged."""
    host: str
    """Address of this machine: its shard is read there."""
    ready_file: str
    """Written when the cell has let this rank in."""
