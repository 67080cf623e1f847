"""`python -m tests.contract.trainer_host DESCRIPTOR`: the trainer of one cell, which does what its owner's test says."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from qwengyre.cell.home import Home
from qwengyre.cell.kinds import build_parts
from qwengyre.core.errors import QwenGyreError
from qwengyre.rpc.refusal import describe


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    model_dir, engine, trainer_config, place, secret = connection.recv()
    transport = place.open()
    _, trainer = build_parts(model_dir, engine, trainer_config, Home(transport, place, 1, secret))
    connection.send(os.getpid())
    while (asked := connection.recv()) is not None:
        method, args = asked
        try:
            connection.send(getattr(trainer, method)(*args))
        except QwenGyreError as error:
            connection.send(describe(error))
    transport.close()
    os._exit(0)  # ranks and engine threads end with it


if __name__ == "__main__":
    main(int(sys.argv[1]))
