"""`python -m qwengyre.runtime.rank_process FD`: one rank of a cell, ordered by the cell over the connection FD."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import torch.distributed as dist

from qwengyre.core.errors import QwenGyreError
from qwengyre.runtime.rank import HOST, Rank, RankSpec, Refusal
from qwengyre.telemetry.log_lines import log_to


def serve(connection: Connection) -> None:
    """Answer orders until the cell closes the connection. What is no QwenGyreError ends the process, and with it the cell."""
    spec: RankSpec = connection.recv()
    carrier = spec.place.open()
    rank = Rank(spec, carrier, dist.TCPStore(HOST, spec.port, is_master=False))
    try:
        while True:
            method, args = connection.recv()
            try:
                answer = rank.call(method, args)
            except QwenGyreError as error:
                answer = Refusal(type(error).__name__, str(error))
            connection.send(answer)
    except (EOFError, BrokenPipeError):
        carrier.close()


if __name__ == "__main__":
    log_to(None)
    serve(Connection(int(sys.argv[1])))
