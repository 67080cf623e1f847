"""`python -m qwengyre.cell.ranks.process WHERE`: one rank of a cell, asked by the cell over one connection.

WHERE is the connection's file descriptor and the rank (`7:1`) in a child of the cell; on another machine a file with `JoinOrders`.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
from pathlib import Path

import msgspec

from qwengyre.cell.ranks import api
from qwengyre.cell.ranks.rank import TABLE, carry_out, open_rank
from qwengyre.core.errors import ConfigError
from qwengyre.rpc import tls
from qwengyre.rpc.address import TcpAddress, parse_address
from qwengyre.rpc.channel import Channel
from qwengyre.telemetry.log_lines import log_to


def join(orders: api.JoinOrders) -> tuple[Channel, api.RankSpec]:
    """Go to the cell; it answers with what this rank is to be."""
    where = parse_address(orders.at)
    if not isinstance(where, TcpAddress):
        raise ConfigError(f"ranks of other machines are met over TCP, not at {orders.at}")
    tls.use(orders.tls)
    channel = Channel.connect(where, orders.secret, orders.timeout_s)
    spec = channel.call(api.Join(orders.rank), api.RankSpec)
    Path(orders.ready_file).touch()
    return channel, msgspec.structs.replace(spec, place=msgspec.structs.replace(spec.place, host=orders.host))


def serve(channel: Channel, spec: api.RankSpec) -> None:
    """Until the cell closes the connection. Any error that is not a QwenGyreError ends the process, and with it the cell."""
    tls.use(spec.tls)
    transport = spec.place.open()
    rank = open_rank(spec, transport)
    with contextlib.suppress(ConnectionError):
        channel.serve(dict.fromkeys(TABLE, functools.partial(carry_out, rank.member)))
    transport.close()


def main(where: str) -> None:
    log_to(None)
    descriptor, _, rank = where.partition(":")
    if descriptor.isdigit():
        channel = Channel(socket.socket(fileno=int(descriptor)))
        serve(channel, channel.call(api.Join(int(rank)), api.RankSpec))
    else:
        serve(*join(msgspec.json.decode(Path(where).read_bytes(), type=api.JoinOrders)))


if __name__ == "__main__":
    main(sys.argv[1])
