"""What a harness or an evaluator prints: through a pipe into a log file that it never has open.

A descriptor of the file itself would let it cut, fill and chmod a file of the run folder. The pipe is read as fast as it is written to at
first, then at a rate that costs this process little: a program that prints without end waits for its own output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

from qwengyre.rpc.logs import LOG_TAIL_BYTES

CHUNK_BYTES: Final = 65536
"""What a pipe holds."""
UNHURRIED_BYTES: Final = 1 << 20
"""Read without a pause; few programs print more."""
PAUSE_S: Final = 0.02
"""Between two chunks after that: 3 MB/s."""
MAX_LOG_BYTES: Final = 16 << 20
"""Written to the file; of what comes after that only the end is."""


class LogPipe:
    """Copies what is written to `writer` into the file at `path`, from within a running event loop. Close it after all writers."""

    def __init__(self, path: Path, uid: int | None):
        self._loop = asyncio.get_running_loop()
        self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        if uid is not None:
            os.fchown(self.writer, uid, uid)  # so that it can be opened again, as /dev/stderr
        self._num_bytes = 0
        self._end = b""
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._reader, self._read)

    def _read(self) -> None:
        if not self._read_chunk():
            self._loop.remove_reader(self._reader)
        elif self._num_bytes > UNHURRIED_BYTES:
            self._loop.remove_reader(self._reader)
            self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._reader, self._read)

    def _read_chunk(self) -> bool:
        """Copy one chunk; False when there is none now, or none will come."""
        try:
            data = os.read(self._reader, CHUNK_BYTES)
        except BlockingIOError:
            return False
        room = max(0, MAX_LOG_BYTES - self._num_bytes)
        self._num_bytes += len(data)
        self._write(data[:room])
        self._end = (self._end + data[room:])[-LOG_TAIL_BYTES:]
        return bool(data)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk is noticed where it matters, not by what a harness prints
            os.write(self._file, data)

    def close(self) -> None:
        """Copy what is still in the pipe, and close everything."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._reader)
        os.close(self.writer)
        while self._read_chunk():
            pass
        left_out = self._num_bytes - MAX_LOG_BYTES - len(self._end)
        if left_out > 0:
            self._write(b"\n[%d bytes left out]\n" % left_out)
        self._write(self._end)
        os.close(self._reader)
        os.close(self._file)
