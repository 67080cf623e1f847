"""The fields of a request's body: each is honored, ignored for a reason, or refused with what to do instead.

A dialect has one table of them. It is what the parser goes by and what docs/gateway.md prints, so nothing that a client asks for is
dropped in silence: what is ignored is named in a header of the answer, fields that no table knows included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Json = dict[str, Any]
"""An object of JSON."""
NULL = msgspec.Raw(b"null")
MAX_NAMED = 16
"""More ignored fields than this are not named: a client that invents names gets no header of a thousand."""
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


class InvalidRequest(Exception):
    """The client sent something that cannot be served: an error in its dialect, status 4xx."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        self.message, self.param, self.status, self.code = message, param, status, code
        super().__init__(message)


class Honored(msgspec.Struct, frozen=True):
    note: str = ""


class Ignored(msgspec.Struct, frozen=True):
    because: str


class RefusedField(msgspec.Struct, frozen=True):
    do: str
    """What the client should do instead."""
    unless: tuple[Any, ...] = ()
    """Values that ask for nothing and are accepted; null always is."""


Field = Honored | Ignored | RefusedField

SAMPLING = Ignored("the run sets how the policy is sampled, so that log-probs are its own")
TEMPLATE = Ignored("the run's chat template sets how the policy thinks and writes")
ACCOUNT = Ignored("it concerns a provider's bills, records or machines")
CACHE = Ignored("every prefix is kept while its execution runs, marked or not")
OF_THE_PROVIDER = RefusedField("only the provider's own tools make it, and there are none here")
ANY_MODEL = Honored("echoed; the policy answers to every name")
TEXT_ONLY = RefusedField("the policy writes text: leave this out")
UNCONSTRAINED = "the policy is not constrained: ask for the format in the prompt and leave this out"


def decode(raw: bytes, form: type[T] | UnionType, what: str) -> T:
    """Decode JSON. Raises InvalidRequest that says where it is wrong. What a union of types gives is known to who asked."""
    try:
        found: T = msgspec.json.decode(raw, type=form)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"{what}: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"{what}: nested too deeply") from error


class Body:
    """A request's body, its fields still raw, and the names of those that will be ignored."""

    def __init__(self, raw: Mapping[str, msgspec.Raw], ignored: list[str]):
        self._raw, self._ignored = raw, ignored

    @classmethod
    def read(cls, body: bytes, table: Mapping[str, Field]) -> Body:
        """Read a body by its dialect's table; a name with a dot is a field of an object. Raises InvalidRequest for what is refused."""
        raw = decode(body, dict[str, msgspec.Raw], "request body")
        ignored = [
            name for name, value in raw.items() if _asks(value) and not isinstance(table.get(name), Honored | RefusedField)
        ]
        for name, field in table.items():
            if isinstance(field, RefusedField):
                _refuse(name, field, raw)
        return cls(raw, ignored)

    def raw(self, name: str) -> bytes:
        """The field's JSON, `null` where it is missing."""
        return self._raw.get(name, NULL)

    def get(self, name: str, form: type[T] | UnionType, default: T) -> T:
        """The field's value, `default` where it is missing or null."""
        raw = self._raw.get(name)
        return decode(raw, form, name) if raw is not None and _asks(raw) else default

    def count(self, name: str) -> int | None:
        """A whole number from 1 on; clients that count in floats may write `100.0`."""
        number: float | None = self.get(name, int | float | None, None)
        if number is None:
            return None
        if number != number // 1 or number < 1:
            raise InvalidRequest(f"{name} must be a whole number from 1 on, not {number}", param=name)
        return int(number)

    def ignore(self, what: str) -> None:
        """Note that a part of a field that is honored otherwise will be ignored."""
        self._ignored.append(what)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names that may stand in a header."""
        return tuple(name for name in self._ignored if _PLAIN.fullmatch(name))[:MAX_NAMED]


def refusal(table: Mapping[str, Field], kind: object, place: str) -> InvalidRequest:
    """The error for a part of a kind that is not served; `place` is the field in which it stands."""
    field = table.get(kind) if isinstance(kind, str) else None
    do = field.do if isinstance(field, RefusedField) else "it is not known; this model reads text"
    return InvalidRequest(f"{place}: {kind!r} is not served: {do}", param=place)


def _asks(raw: bytes) -> bool:
    return bytes(memoryview(raw)[:5]) != b"null"


def _refuse(name: str, field: RefusedField, raw: Mapping[str, msgspec.Raw]) -> None:
    name, _, inner = name.partition(".")
    value = raw.get(name)
    if value is None or not _asks(value):
        return
    if inner:
        name, value = f"{name}.{inner}", decode(value, dict[str, msgspec.Raw], name).get(inner, NULL)
    if _asks(value) and decode(value, Any, name) not in field.unless:
        raise InvalidRequest(f"{name} is not served: {field.do}", param=name)
