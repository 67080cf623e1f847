"""The end of what a process printed, for the error that says that it ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LOG_TAIL_BYTES: Final = 2000
"""A screenful."""


def log_tail(path: Path, *, num_bytes: int = LOG_TAIL_BYTES, secret: str = "") -> str:
    """The last bytes of a log file as text, without `secret`; empty when there is no log."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            text = file.read(num_bytes).decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
    return text.replace(secret, "<key>") if secret else text
