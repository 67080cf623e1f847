"""The transport that a config names."""

from __future__ import annotations

import msgspec

from qwengyre.transfer.api import Transport
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmTransport
from qwengyre.transfer.tcp import TcpTransport


def open_transport(config: TransferConfig, *, prefix: str, host: str = "127.0.0.1") -> Transport:
    """The transport of this process, which listens on `host` unless the config says where.

    `prefix` is the run's: `shm.cleanup(prefix)` removes what killed processes left.
    """
    if config.transport == "tcp":
        return TcpTransport(config.host or host, deadline_s=config.deadline_s)
    if config.transport == "mooncake":
        from qwengyre.transfer.mooncake import MooncakeTransport

        return MooncakeTransport(config.host or host, protocol=config.mooncake_protocol, device=config.mooncake_device)
    return ShmTransport(prefix)


class TransportPlace(msgspec.Struct, frozen=True):
    """What every process of a cell opens its transport with."""

    transfer: TransferConfig
    prefix: str
    host: str

    def open(self) -> Transport:
        return open_transport(self.transfer, prefix=self.prefix, host=self.host)
