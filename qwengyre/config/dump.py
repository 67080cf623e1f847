"""Write a config as TOML that loads back to the same config, and the help text of every key."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import NODEFAULT

from qwengyre.config.shape import Key, keys
from qwengyre.core.errors import ConfigError
from qwengyre.core.near import nearest


def dump_toml(config: msgspec.Struct) -> str:
    """The config as resolved, every key written out. Keys that are None are left out: absent means None in TOML.

    Round trip: `loads(dump_toml(config), type(config)) == config`.
    """
    return "\n".join(_table(msgspec.to_builtins(config), ())).strip() + "\n"


def explain(struct: type[msgspec.Struct], only: str = "") -> str:
    """A commented TOML template with every key of `struct`: docstring, type, default.

    `only` keeps one table (`scheduler`), one key (`scheduler.steps`), or every key of that name (`steps`). Raises ConfigError when
    there is none.
    """
    lines: list[str] = []
    table: tuple[str, ...] = ()
    chosen = [key for key in keys(struct) if not only or only in _names(key)]
    if not chosen:
        raise ConfigError(f"no such table or key{_similar(struct, only)}", key=only)
    for key in chosen:
        if key.path[:-1] != table:
            table = key.path[:-1]
            lines.append(f"\n[{'.'.join(table)}]")
        lines.extend(textwrap.wrap(f"{key.doc} ({key.kind})".strip(), 110, initial_indent="# ", subsequent_indent="# "))
        default = msgspec.to_builtins(key.default) if key.default is not NODEFAULT else NODEFAULT
        if default is NODEFAULT:
            lines.append(f"# {key.path[-1]} =            must be given")
        else:
            lines.append(f"# {key.path[-1]} = {'(nothing)' if default is None else dump_value(default)}")
    return "\n".join(lines).strip() + "\n"


def _names(key: Key) -> set[str]:
    """What a key answers to: its own name, with and without its tables, and those."""
    return {key.path[-1], *(".".join(key.path[: length + 1]) for length in range(len(key.path)))}


def _similar(struct: type[msgspec.Struct], only: str) -> str:
    """The most similar names, else all tables."""
    known = {name for key in keys(struct) for name in _names(key)}
    if near := nearest(only, known):
        return f". Did you mean {near}?"
    name = only.rsplit(".", 1)[-1]
    if near := nearest(name, known):
        dotted = [".".join(key.path) for key in keys(struct) if near in _names(key) and key.path[-1] == near]
        return f". Did you mean {' or '.join(dotted[:3]) or near}?"
    return f"; the tables are: {', '.join(struct.__struct_fields__)}"


def _table(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for name, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{_key(name)} = {dump_value(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            inner = (*path, name)
            yield f"\n[{'.'.join(_key(part) for part in inner)}]"
            yield from _table(value, inner)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def dump_value(value: object) -> str:
    """As the right side of an assignment in TOML. Raises TypeError for what cannot stand there: None."""
    match value:
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return repr(value)
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return "[" + ", ".join(dump_value(item) for item in value) + "]"
        case dict():
            inner = ", ".join(f"{_key(name)} = {dump_value(item)}" for name, item in value.items() if item is not None)
            return "{ " + inner + " }" if inner else "{}"
    raise TypeError(f"{type(value).__name__} cannot stand in TOML")


def _string(value: str) -> str:
    """A basic string; JSON escapes are TOML escapes, but for DEL and characters beyond the BMP, which stay as they are."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
