"""The carrier that a config names."""

from __future__ import annotations

import msgspec

from qwengyre.transfer.api import Carrier
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmCarrier
from qwengyre.transfer.tcp import TcpCarrier


def open_carrier(config: TransferConfig, *, prefix: str, host: str = "127.0.0.1") -> Carrier:
    """The carrier of this process, which listens on `host` unless the config says where.

    `prefix` is the run's: `shm.cleanup(prefix)` removes what killed processes left.
    """
    if config.carrier == "tcp":
        return TcpCarrier(config.host or host, deadline_s=config.deadline_s)
    if config.carrier == "mooncake":
        from qwengyre.transfer.mooncake import MooncakeCarrier

        return MooncakeCarrier(config.host or host, protocol=config.mooncake_protocol, device=config.mooncake_device)
    return ShmCarrier(prefix)


class CarrierPlace(msgspec.Struct, frozen=True):
    """What every process of a cell opens its carrier with."""

    transfer: TransferConfig
    prefix: str
    host: str

    def open(self) -> Carrier:
        return open_carrier(self.transfer, prefix=self.prefix, host=self.host)
