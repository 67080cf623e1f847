"""The carrier that a config names."""

from __future__ import annotations

from qwengyre.transfer.api import Carrier
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmCarrier
from qwengyre.transfer.tcp import TcpCarrier


def open_carrier(config: TransferConfig, *, prefix: str) -> Carrier:
    """The carrier of this process. `prefix` is the run's: `shm.cleanup(prefix)` removes what killed processes left."""
    if config.carrier == "tcp":
        return TcpCarrier(config.host, deadline_s=config.deadline_s)
    return ShmCarrier(prefix)
