"""Log lines of our processes: what happened, then its fields as `key=value`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldsFormatter(logging.Formatter):
    """Appends whatever a call gave as `extra`.

    >>> record = logging.makeLogRecord({"msg": "cell_drained", "cell": 3, "levelname": "INFO", "name": "x"})
    >>> FieldsFormatter("%(name)s %(message)s").format(record)
    'x cell_drained cell=3'
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{key}={value}" for key, value in vars(record).items() if key not in _STANDARD]
        return " ".join([super().formatMessage(record), *fields])


def log_to(path: Path | None, level: int = logging.INFO) -> None:
    """Send this process's log to `path`, or to stderr."""
    handler = logging.FileHandler(path) if path is not None else logging.StreamHandler()
    handler.setFormatter(FieldsFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
