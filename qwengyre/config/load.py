"""Load TOML into a frozen Struct, strictly. Whatever is wrong becomes a ConfigError with file, line, key and what to write."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect as shapes

from qwengyre.config.lines import KeyPath, key_lines, line_of
from qwengyre.config.shape import in_words, keys, struct_at, type_at
from qwengyre.core.errors import ConfigError

Loaded = TypeVar("Loaded", bound=msgspec.Struct)

_AT_PATH: Final = re.compile(r" - at `\$(.*)`$")
_AT_LINE: Final = re.compile(r" \(at line (\d+), column \d+\)$")


def load(path: str | Path, struct: type[Loaded], overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Read the TOML file at `path` into `struct`; `overrides` such as "scheduler.steps=20" win over the file.

    Raises ConfigError naming file, line and key: a missing or broken file, an unknown key (with the nearest valid one),
    a value of the wrong type (with what was expected), a missing key, or a rule of a `__post_init__`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark, as some editors write it, is no mistake
    except OSError as error:
        raise ConfigError(f"cannot read this file ({error.strerror})", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("this file is not UTF-8 text", file=str(path)) from error
    return loads(text, struct, overrides, file=str(path))


def loads(text: str, struct: type[Loaded], overrides: list[str] | tuple[str, ...] = (), *, file: str = "<text>") -> Loaded:
    """As `load`, from a text."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        message = f"not valid TOML: {_AT_LINE.sub('', str(error))}"
        raise ConfigError(message, file=file, line=int(at[1]) if at else text.count("\n") + 1) from error
    origin = _Origin(file, key_lines(text))
    for override in overrides:
        key, value = parse_override(override)
        _put(table, key, value, override)
        origin.overrides[key] = override
    _refuse_unknown(table, shapes.type_info(struct), (), struct, origin)
    try:
        return msgspec.convert(table, struct)
    except msgspec.ValidationError as error:
        raise _explained(error, table, struct, origin) from error


def parse_override(override: str) -> tuple[KeyPath, Any]:
    """Split "a.b=3" into its key and its TOML value; a value that is no TOML is taken as a string.

    >>> parse_override("scheduler.policy=colocate"), parse_override("a.b=[1, 2]")
    ((('scheduler', 'policy'), 'colocate'), (('a', 'b'), [1, 2]))
    """
    key, equals, value = override.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError("write it as table.key=value, for instance scheduler.steps=20", file=f"--set {override}")
    try:
        return parts, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return parts, value.strip()


class _Origin:
    """Where each value came from: the file or an override."""

    def __init__(self, file: str, lines: dict[KeyPath, int]):
        self.file, self.lines, self.overrides = file, lines, dict[KeyPath, str]()

    def error(self, message: str, key: KeyPath) -> ConfigError:
        dotted = ".".join(key) or None
        # An override that put something below `key` is what made it wrong: the file has another value there.
        override = next((said for at, said in self.overrides.items() if at[: len(key)] == key), None) if key else None
        if override is not None:
            return ConfigError(message, file=f"--set {override}", key=dotted)
        return ConfigError(message, file=self.file, key=dotted, line=line_of(self.lines, key))


def _put(table: dict[str, Any], key: KeyPath, value: object, override: str) -> None:
    for part in key[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{part} is a value, not a table", file=f"--set {override}", key=".".join(key))
    table[key[-1]] = value


def _refuse_unknown(value: object, shape: shapes.Type, at: KeyPath, root: type[msgspec.Struct], origin: _Origin) -> None:
    """Every Struct is strict here, whether or not it forbids unknown fields itself."""
    if isinstance(value, list):
        item = getattr(shape, "item_type", None)
        for element in value if item is not None else ():
            _refuse_unknown(element, item, at, root, origin)
        return
    if not isinstance(value, dict):
        return
    struct = struct_at(shape, value)
    if struct is None:
        item = getattr(shape, "value_type", None)
        for name, element in value.items() if item is not None else ():
            _refuse_unknown(element, item, (*at, name), root, origin)
        return
    fields = {field.encode_name: field.type for field in struct.fields}
    for name, element in value.items():
        if name in fields:
            _refuse_unknown(element, fields[name], (*at, name), root, origin)
        elif name != struct.tag_field:
            raise origin.error(f"no such key{_nearest(name, at, tuple(fields), root)}", (*at, name))


def _nearest(name: str, at: KeyPath, siblings: tuple[str, ...], root: type[msgspec.Struct]) -> str:
    """A hint: the most similar key of the same table, else the same or a similar key of another table."""
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return f". Did you mean {'.'.join((*at, near[0]))}?"
    elsewhere = {key.path[-1]: ".".join(key.path) for key in keys(root)}
    near = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75)
    if near:
        return f". Did you mean {elsewhere[near[0]]}?"
    where = f"[{'.'.join(at)}]" if at else "the run file"
    return f". {where} knows: {', '.join(siblings)}"


def _explained(error: msgspec.ValidationError, table: dict[str, Any], root: type[msgspec.Struct], origin: _Origin) -> ConfigError:
    message = str(error)
    found = _AT_PATH.search(message)
    key = tuple(part for part in re.split(r"[.\[\]]+", found[1]) if part) if found else ()
    message = _AT_PATH.sub("", message)
    value: Any = table
    for part in key:
        value = value.get(part) if isinstance(value, dict) else None
    shape = type_at(root, tuple("0" if part == "..." else part for part in key), table)
    named = tuple(part for part in key if part != "..." and not part.isdigit())
    if missing := re.match(r"Object missing required field `(.*)`", message):
        return origin.error("this key is missing and has no default", (*named, missing[1]))
    if shape is not None and message.startswith(("Expected", "Invalid", "Unexpected")):
        hint = ""
        if isinstance(value, str):
            choices = [str(choice) for choice in getattr(shape, "values", ())]
            near = difflib.get_close_matches(value, choices, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
        return origin.error(f"expected {in_words(shape)}, got {_shown(value)}{hint}", named)
    # A rule of a __post_init__: by convention its sentence starts with the field that breaks it.
    field = re.match(r"[a-z_0-9]+\b", message)
    inner = struct_at(shape, value) if shape is not None else None
    if field and inner is not None and field[0] in {known.name for known in inner.fields}:
        named = (*named, field[0])
    return origin.error(message, named)


def _shown(value: object) -> str:
    return "a table" if isinstance(value, dict) else f"{value!r} ({type(value).__name__})"
