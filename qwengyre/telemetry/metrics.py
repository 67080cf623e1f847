"""Write and read metrics.jsonl; the writer feeds TensorBoard too."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from qwengyre.core.errors import JournalCorrupt, JournalFull
from qwengyre.telemetry.event_file import EventFile
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.records import FINISHED, MetricRecord, RunBegan, RunEnded, scalars

_DECODER = msgspec.json.Decoder(MetricRecord)


class Metrics:
    """The one writer of a run's metrics. A line that a kill left half written is cut when the run is resumed."""

    def __init__(self, folder: RunFolder):
        _cut_torn_line(folder.metrics)
        self._file = open(folder.metrics, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._events = EventFile(folder.tensorboard, wall_time=time.time())
        self._encode = msgspec.json.Encoder().encode

    def record(self, record: MetricRecord) -> None:
        """Append one record; it is visible to readers at once. Raises JournalFull when there is no room for it."""
        line = self._encode(record) + b"\n"
        step, values = scalars(record)
        end = self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if values:
                self._events.add(values, step=int(record.at) if step is None else step, wall_time=time.time())
        except OSError as error:
            self._file.truncate(end)
            raise JournalFull(self._file.name, num_bytes=len(line), reason=error.strerror or str(error)) from error

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> Iterator[MetricRecord]:
    """Every record of a metrics file in order; none if there is no file yet. A last line without its end is left out.

    Raises JournalCorrupt for a line that is not a record.
    """
    path = Path(path)
    if not path.exists():
        return
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield _decoded(line, path, offset)
            offset += len(line)


class MetricsTail:
    """The records of a metrics file that grows: each `refresh` reads what came since. A last line without its end waits for the next."""

    def __init__(self, path: str | Path):
        self.records: list[MetricRecord] = []
        self._path = Path(path)
        self._offset = 0

    def refresh(self) -> None:
        """Raises JournalCorrupt for a line that is not a record."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.records.append(_decoded(line, self._path, self._offset))
                self._offset += len(line)


def has_finished(folder: RunFolder) -> bool:
    """Whether the run was led to its end, so that nothing is left to do. Raises JournalCorrupt."""
    bounds = [record for record in read_metrics(folder.metrics) if isinstance(record, (RunBegan, RunEnded))]
    return bool(bounds) and isinstance(bounds[-1], RunEnded) and bounds[-1].reason == FINISHED


def _decoded(line: bytes, path: Path, offset: int) -> MetricRecord:
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError as error:
        reason = f"this line is not a metric of this version ({error}). Delete it to read the rest: a run is never resumed from metrics"
        raise JournalCorrupt(str(path), offset=offset, reason=reason) from error


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            with open(path, "r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
