"""A table of plain values to a Struct, with all mistakes at once: what is wrong is left out, and the rest looked at all the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as shapes

from qwengyre.config.lines import KeyPath
from qwengyre.config.shape import in_words, keys, struct_at
from qwengyre.core.near import nearest

RENAMED: Final[dict[tuple[str, ...], str]] = {("transfer", "carrier"): "transfer.transport"}
"""Keys of earlier run files, and what to write now."""
_WRONG: Final = object()
_RULE_OF: Final = re.compile(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)*")
"""By convention the sentence of a `__post_init__` starts with the field that breaks the rule."""


class Mistake(NamedTuple):
    key: KeyPath
    message: str


class Converter:
    """Converts one table, and keeps what it found wrong in `mistakes`."""

    def __init__(self, struct: type[msgspec.Struct], name: str = "the run file"):
        """`name` is what the whole table is called where its keys are listed."""
        self._struct, self._name, self.mistakes = struct, name, list[Mistake]()

    def convert(self, table: dict[str, Any]) -> Any:
        """The Struct, with the default of every key that is wrong; None when it cannot do without one of those."""
        made = self._to_struct(table, self._struct, ())
        return None if made is _WRONG else made

    def _to_struct(self, table: dict[str, Any], cls: type[msgspec.Struct], at: KeyPath) -> Any:
        shape, kinds = shapes.type_info(cls), get_type_hints(cls, include_extras=True)
        fields = {field.encode_name: field for field in shape.fields}  # type: ignore[attr-defined]
        found: dict[str, Any] = {}
        for name, value in table.items():
            if name in fields:
                made = self._to(value, kinds[fields[name].name], (*at, name))
                if made is not _WRONG:
                    found[fields[name].name] = made
            elif name != cls.__struct_config__.tag_field:
                self._mistake((*at, name), f"no such key{self._hint(name, at, tuple(fields))}")
        required = [name for name, field in fields.items() if field.required]
        for name in required:
            if name not in table:
                self._mistake((*at, name), "this key is missing and has no default")
        if any(fields[name].name not in found for name in required):
            return _WRONG
        return self._made(cls, found, at)

    def _made(self, cls: type[msgspec.Struct], found: dict[str, Any], at: KeyPath) -> Any:
        """The Struct of the fields found, without those that break a rule of its own."""
        told: set[str] = set()
        while True:
            try:
                return cls(**found)
            except (ValueError, TypeError) as error:
                message = str(error)
                rule = _RULE_OF.match(message)
                named = rule[0].split(".") if rule else []
                is_field = bool(named) and named[0] in cls.__struct_fields__
                if is_field and named[0] in told:
                    return _WRONG  # its default breaks the rule as well, because of another field
                self._mistake((*at, *named) if is_field else at, message)
                if not is_field or found.pop(named[0], _WRONG) is _WRONG or _is_required(cls, named[0]):
                    return _WRONG
                told.add(named[0])

    def _to(self, value: Any, kind: Any, at: KeyPath) -> Any:
        shape = shapes.type_info(kind)
        struct = struct_at(shape, value)
        if struct is not None and isinstance(value, dict):
            return self._to_struct(value, struct.cls, at)
        tagged = [member for member in getattr(shape, "types", ()) if isinstance(member, shapes.StructType) and member.tag_field]
        if tagged and isinstance(value, dict):
            tag = str(tagged[0].tag_field)
            tags = ", ".join(repr(member.tag) for member in tagged)
            self._mistake((*at, tag), f"expected one of {tags}, got {_shown(value.get(tag))}")
            return _WRONG
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            parts = [part for part in _parts(value, kind) if not _fits(part.value, part.kind)]
            for part in parts:
                self._to(part.value, part.kind, (*at, *part.key))
            if not parts:
                self._mistake(at, f"expected {in_words(shape)}, got {_shown(value)}{_choice(value, shape)}")
            return _WRONG

    def _hint(self, name: str, at: KeyPath, siblings: tuple[str, ...]) -> str:
        """What the key is called now, else the most similar key of the same table, else the same or a similar key of another table."""
        if renamed := RENAMED.get((*at, name)):
            return f" any more. Write {renamed}"
        if near := nearest(name, siblings):
            return f". Did you mean {'.'.join((*at, near))}?"
        elsewhere = {key.path[-1]: ".".join(key.path) for key in keys(self._struct)}
        if near := nearest(name, elsewhere, cutoff=0.75):
            return f". Did you mean {elsewhere[near]}?"
        where = f"[{'.'.join(at)}]" if at else self._name
        return f". {where} knows: {', '.join(siblings)}"

    def _mistake(self, key: KeyPath, message: str) -> None:
        self.mistakes.append(Mistake(key, message))


class _Part(NamedTuple):
    """One entry of a table, or one of a list, which has no key of its own."""

    key: KeyPath
    value: Any
    kind: Any


def _parts(value: Any, kind: Any) -> Iterator[_Part]:
    """What a table or a list of one kind of things holds."""
    for choice in get_args(kind) if get_origin(kind) not in (dict, tuple, list) else (kind,):
        origin, args = get_origin(choice), get_args(choice)
        if origin is dict and isinstance(value, dict):
            yield from (_Part((str(key),), part, args[1]) for key, part in value.items())
            return
        if origin in (tuple, list) and isinstance(value, (list, tuple)) and len(set(args) - {Ellipsis}) == 1:
            yield from (_Part((), part, args[0]) for part in value)
            return


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _is_required(cls: type[msgspec.Struct], name: str) -> bool:
    field = next(field for field in shapes.type_info(cls).fields if field.name == name)  # type: ignore[attr-defined]
    return field.default is NODEFAULT and field.default_factory is NODEFAULT


def _choice(value: Any, shape: shapes.Type) -> str:
    near = nearest(value, [str(choice) for choice in getattr(shape, "values", ())]) if isinstance(value, str) else None
    return f". Did you mean {near!r}?" if near else ""


def _shown(value: object) -> str:
    return "a table" if isinstance(value, dict) else f"{value!r} ({type(value).__name__})"
