"""`python -m checks.faults.recording_cell FOLDER PYTHON -m PROGRAM ...`: a cell that writes down every token before it sends it."""

from __future__ import annotations

import os
import runpy
import sys

import msgspec

from qwengyre.engines import server


class Began(msgspec.Struct, frozen=True, tag=True):
    request: str
    first_index: int


class Made(msgspec.Struct, frozen=True, tag=True):
    request: str
    token_ids: tuple[int, ...]
    version: int


def record(folder: str) -> None:
    """Wrap the data plane of this process."""
    file = os.open(f"{folder}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    generate, send_chunks = server._Peer._generate, server._Peer._send_chunks

    async def recorded_generate(self, start) -> None:
        os.write(file, msgspec.json.encode(Began(start.request.request_id, start.request.sampling.first_index)) + b"\n")
        await generate(self, start)

    def recorded_send_chunks(self) -> None:
        for chunk in self._outgoing:
            os.write(file, msgspec.json.encode(Made(chunk.request_id, chunk.token_ids, chunk.version)) + b"\n")
        send_chunks(self)

    server._Peer._generate, server._Peer._send_chunks = recorded_generate, recorded_send_chunks


if __name__ == "__main__":
    record(sys.argv[1])
    program = sys.argv[sys.argv.index("-m") + 1 :]
    sys.argv = program
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)
