"""What a fault is, and what the injector writes down about it."""

from __future__ import annotations

from typing import Literal

import msgspec

from checks.faults.network import Network

How = Literal["kill", "stall", "pause", "cut", "reset"]
"""SIGKILL; SIGSTOP for good; SIGSTOP for `PAUSE_S`; its network link down; its TCP connections dropped."""
PAUSE_S = 1.0


class Fault(msgspec.Struct, frozen=True):
    victim: str
    """A server (`cell-0` is the core), `gateway`, `controller`, `harness` or `evaluator`."""
    how: How
    phase: str
    """An operation of the control API that is in flight, `Move` for a drain, or `rollout`: calls are running."""
    at: str = ""
    """The server whose operation it is; empty: the victim's, or anybody's when the victim has none."""

    @property
    def name(self) -> str:
        return f"{self.how} {self.victim} in {self.phase}" + (f" of {self.at}" if self.at else "")


class Noted(msgspec.Struct, frozen=True):
    """A line of the injector's log."""

    fault: str
    event: Literal["struck", "lost", "back"]
    at: float
    """Seconds by the controller's event loop, which pass more slowly when the machine has other work."""
    who: str = ""


class Script(msgspec.Struct, frozen=True):
    """The injector's orders: faults in this order, each once the one before is over."""

    faults: list[Fault]
    notes: str
    """File of `Noted` lines."""
    made: str
    """Folder where every cell writes down the tokens that it makes."""
    network: Network | None = None
    """Every cell in a namespace of this network, so that its link can be cut."""
