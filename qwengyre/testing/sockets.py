"""Where processes listen, as the kernel says."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

LISTEN = "0A"
"""The state of a socket in /proc/net/tcp (include/net/tcp_states.h)."""


def listening_hosts(pid: int) -> list[str]:
    """Addresses on which this process accepts TCP connections, one for each socket."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:  # closed meanwhile
            continue
    hosts = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in own:
                hosts.append(_host(fields[1].partition(":")[0]))
    return hosts


def _host(words: str) -> str:
    """The kernel writes an address as 32-bit words in the byte order of the machine, which is little-endian here.

    >>> _host("0100007F"), _host("00000000")
    ('127.0.0.1', '0.0.0.0')
    """
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(ipaddress.ip_address(packed))
