"""A network of one machine for the cells of a run: a namespace and a link for each, a bridge between them. Needs root and `ip`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BRIDGE = "qgbr0"
SUBNET = "10.213.7"


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def number_of(server: str) -> int:
    """
    >>> number_of("cell-2"), number_of("standalone-0")
    (2, 100)
    """
    kind, _, index = server.partition("-")
    return int(index) + (100 if kind == "standalone" else 0)


def namespace(server: str) -> str:
    return f"qgns{number_of(server)}"


def link(server: str) -> str:
    return f"qgl{number_of(server)}"


def address(server: str) -> str:
    return f"{SUBNET}.{number_of(server) + 2}"


@contextmanager
def network(servers: list[str]) -> Iterator[None]:
    take_down(servers)
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    try:
        for server in servers:
            space, outer = namespace(server), link(server)
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{address(server)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        take_down(servers)


def take_down(servers: list[str]) -> None:
    for server in servers:
        _ip("link", "del", link(server), check=False)
        _ip("netns", "del", namespace(server), check=False)
    _ip("link", "del", BRIDGE, check=False)


def cut(server: str) -> None:
    """Nothing goes in or out any more, and nobody is told."""
    _ip("link", "set", link(server), "down")


def mend(server: str) -> None:
    _ip("link", "set", link(server), "up")


def drop_connections(server: str) -> None:
    """Reset every TCP connection that the server's processes have."""
    subprocess.run(
        ["ip", "netns", "exec", namespace(server), "ss", "-K", "-t", "state", "established"], check=True, capture_output=True
    )


def drop_connections_of_port(port: int) -> None:
    """Reset every TCP connection to a port of this machine, at the server's end."""
    subprocess.run(["ss", "-K", "-t", "state", "established", f"( sport = :{port} )"], check=True, capture_output=True)
