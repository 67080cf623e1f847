"""An error on its way to another process: one record, made by `describe`, and the same error again by `rebuild`. Pure."""

from __future__ import annotations

import msgspec

from qwengyre.core import errors
from qwengyre.core.errors import QwenGyreError


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What was asked failed with a typed error; the process that was asked lives on."""

    kind: str
    """Name of the error's type in `core/errors.py`."""
    message: str
    fields: dict[str, object] = {}
    """The error's public attributes. What is not a plain value crosses as its text."""


def describe(error: QwenGyreError) -> Refused:
    fields = {name: _plain(value) for name, value in vars(error).items() if not name.startswith("_")}
    return Refused(type(error).__name__, str(error), fields)


def rebuild(refused: Refused, said_by: str = "") -> QwenGyreError:
    """The error that `describe` saw, with `said_by` before its message; a plain QwenGyreError if this side has no such type.

    >>> error = rebuild(describe(errors.CellFailed(3, "it stalled")), "Compute: ")
    >>> type(error).__name__, error.cell, str(error)
    ('CellFailed', 3, 'Compute: cell 3: it stalled')
    """
    found = getattr(errors, refused.kind, None)
    kind = found if isinstance(found, type) and issubclass(found, QwenGyreError) else QwenGyreError
    error = kind.__new__(kind)
    Exception.__init__(error, said_by + refused.message)
    vars(error).update({name: _tupled(value) for name, value in refused.fields.items()})
    return error


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case tuple() | list():
            return [_plain(item) for item in value]
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _tupled(value: object) -> object:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value
