"""A network of one machine for the cells of a run: a namespace and a link for each, a bridge between them. Needs root and `ip`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

MAX_NETWORKS = 64 * 256
"""Subnets of 256 addresses below 10.64.0.0/10."""


class Network(msgspec.Struct, frozen=True):
    """One of several that may be on this machine."""

    number: int

    @property
    def bridge(self) -> str:
        return f"qgb{self.number}"

    def namespace(self, server: str) -> str:
        return f"qgns{self.number}-{number_of(server)}"

    def link(self, server: str) -> str:
        return f"qgl{self.number}-{number_of(server)}"

    def address(self, server: str) -> str:
        return self._host(number_of(server) + 2)

    def cut(self, server: str) -> None:
        """Nothing goes in or out any more, and nobody is told."""
        _ip("link", "set", self.link(server), "down")

    def mend(self, server: str) -> None:
        _ip("link", "set", self.link(server), "up")

    def drop_connections(self, server: str) -> None:
        """Reset every TCP connection that the server's processes have."""
        _ip("netns", "exec", self.namespace(server), "ss", "-K", "-t", "state", "established")

    def set_up(self, servers: Sequence[str]) -> None:
        _ip("addr", "add", f"{self._host(1)}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for server in servers:
            space, outer = self.namespace(server), self.link(server)
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", self.bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(server)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def take_down(self, servers: Sequence[str]) -> None:
        for server in servers:
            _ip("link", "del", self.link(server), check=False)
            _ip("netns", "del", self.namespace(server), check=False)
        _ip("link", "del", self.bridge, check=False)

    def _host(self, index: int) -> str:
        return f"10.{64 + self.number // 256}.{self.number % 256}.{index}"


def number_of(server: str) -> int:
    """
    >>> number_of("cell-2"), number_of("standalone-0")
    (2, 100)
    """
    kind, _, index = server.partition("-")
    return int(index) + (100 if kind == "standalone" else 0)


@contextmanager
def network(servers: Sequence[str]) -> Iterator[Network]:
    """A network that no other run on this machine has."""
    made = _claim()
    try:
        made.set_up(servers)
        yield made
    finally:
        made.take_down(servers)


def _claim() -> Network:
    """Whoever makes the bridge of a number has the network."""
    for offset in range(MAX_NETWORKS):
        claimed = Network((os.getpid() + offset) % MAX_NETWORKS)
        if subprocess.run(["ip", "link", "add", claimed.bridge, "type", "bridge"], capture_output=True).returncode == 0:
            return claimed
        if not os.path.exists(f"/sys/class/net/{claimed.bridge}"):
            break
    _ip("link", "add", claimed.bridge, "type", "bridge")  # says why it cannot
    return claimed


def drop_connections_of_port(port: int) -> None:
    """Reset every TCP connection to a port of this machine, at the server's end."""
    subprocess.run(["ss", "-K", "-t", "state", "established", f"( sport = :{port} )"], check=True, capture_output=True)


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"ip {' '.join(words)}: {done.stderr}"
