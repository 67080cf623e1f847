"""Log lines of our processes: what happened, then its fields as `key=value`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Final

from qwengyre.core.text import one_line, printable

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldsFormatter(logging.Formatter):
    """Appends whatever a call gave as `extra`. What they quote is made safe to show: a record is one line, but for a traceback.

    >>> record = logging.makeLogRecord({"msg": "cell_drained", "cell": 3, "levelname": "INFO", "name": "x"})
    >>> FieldsFormatter("%(name)s %(message)s").format(record)
    'x cell_drained cell=3'
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{key}={value}" for key, value in vars(record).items() if key not in _STANDARD]
        return one_line(" ".join([super().formatMessage(record), *fields]))

    def formatException(self, ei: ExceptionInfo) -> str:
        return printable(super().formatException(ei))


def log_to(path: Path | None, level: int = logging.INFO) -> None:
    """Send this process's log to `path`, or to stderr."""
    handler = logging.FileHandler(path) if path is not None else logging.StreamHandler()
    handler.setFormatter(FieldsFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
