"""Errors of what an option gave, under the option's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qwengyre.core.errors import ConfigError


@contextmanager
def named_as(option: str, key: str) -> Iterator[None]:
    """A mistake in the run file's `key`, or in a key below it, is one in `option`: there is no run file here."""
    try:
        yield
    except ConfigError as error:
        if error.key is None or not f"{error.key}.".startswith(f"{key}."):
            raise
        raise ConfigError(error.message, file=error.file, key=option, line=error.line) from error
