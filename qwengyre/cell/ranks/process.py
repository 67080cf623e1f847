"""`python -m qwengyre.cell.ranks.process WHERE`: one rank of a cell, ordered by the cell over one connection.

WHERE is the connection's file descriptor in a child of the cell; on another machine a file with a `Joining`.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client, Connection
from pathlib import Path

import msgspec
import torch.distributed as dist

from qwengyre.cell.ranks.rank import Rank, RankSpec
from qwengyre.cell.ranks.rendezvous import Joining
from qwengyre.core.errors import QwenGyreError
from qwengyre.rpc.refusal import describe
from qwengyre.telemetry.log_lines import log_to


def join(joining: Joining) -> tuple[Connection, RankSpec]:
    """Go to the cell; it answers with what this rank is to be."""
    host, _, port = joining.at.rpartition(":")
    connection = Client((host, int(port)), authkey=joining.secret)
    connection.send(joining.rank)
    spec: RankSpec = connection.recv()
    Path(joining.ready_file).touch()
    return connection, msgspec.structs.replace(spec, place=msgspec.structs.replace(spec.place, host=joining.host))


def serve(connection: Connection, spec: RankSpec) -> None:
    """Answer orders until the cell closes the connection. What is no QwenGyreError ends the process, and with it the cell."""
    carrier = spec.place.open()
    host, _, port = spec.store.rpartition(":")
    rank = Rank(spec, carrier, dist.TCPStore(host, int(port), is_master=False))
    try:
        while True:
            method, args = connection.recv()
            try:
                answer = rank.call(method, args)
            except QwenGyreError as error:
                answer = describe(error)
            connection.send(answer)
    except (EOFError, ConnectionError):
        carrier.close()


def main(where: str) -> None:
    log_to(None)
    if where.isdigit():
        connection = Connection(int(where))
        serve(connection, connection.recv())
    else:
        serve(*join(msgspec.json.decode(Path(where).read_bytes(), type=Joining)))


if __name__ == "__main__":
    main(sys.argv[1])
