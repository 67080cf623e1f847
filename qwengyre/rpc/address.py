"""Addresses of servers: `tcp://HOST:PORT` and `unix:PATH`."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from qwengyre.core.errors import ConfigError


class TcpAddress(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


class UnixAddress(NamedTuple):
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


def parse_address(address: str) -> TcpAddress | UnixAddress:
    """Raises ConfigError.

    >>> parse_address("tcp://127.0.0.1:80"), str(parse_address("unix:/run/engine"))
    (TcpAddress(host='127.0.0.1', port=80), 'unix:/run/engine')
    """
    kind, _, rest = address.partition(":")
    host, _, port = rest.removeprefix("//").rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) < 1 << 16:
        return TcpAddress(host, int(port))
    if kind == "unix" and rest:
        return UnixAddress(rest)
    raise ConfigError(f"expected an address such as tcp://HOST:PORT or unix:PATH, not {address!r}")


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach what listens there.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.7", "node-3")]
    [True, True, True, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
